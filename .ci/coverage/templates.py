"""ComfyUI's installed workflow templates as graphs, and what reaches each of their samplers.

A template is what the browser saves: nodes with typed sockets, links by number, and subgraphs that stand in one node for a graph
of their own. Subgraphs are looked through, so that a link always leads to a real node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

PACKAGE = "comfyui_workflow_templates_json"
INSIDE = -10
"""The node that stands, inside a subgraph, for the inputs of the subgraph."""

OUTSIDE = -20
"""The same for its outputs."""

MODEL_TYPES = frozenset({"MODEL", "GUIDER"})
FOLLOWED = MODEL_TYPES | {
    "CONDITIONING", "LATENT", "SAMPLER", "CONTROL_NET", "MODEL_PATCH", "STYLE_MODEL", "LATENT_OPERATION", "HOOKS",
}  # fmt: skip
"""Types of links that carry something of the forward's. Noise and sigmas are numbers of the UI process; images, texts and what
vision and audio encoders make of them are values in a conditioning, and the node that puts them there is followed."""

Json = dict[str, Any]


@dataclass(eq=False)
class Node:
    """A node where it stands: one in a subgraph that is used twice is two of these.

    Args:
        sources: node and type of the output that each linked input takes its value from.
        widgets: the values that the node holds itself.
    """

    type: str
    inputs: dict[str, str]
    outputs: list[str]
    widgets: list[Any]
    sources: dict[str, tuple[Node, str]] = field(default_factory=dict, repr=False)

    def takes(self, kind: str) -> bool:
        return kind in self.inputs.values()

    def gives(self, kind: str) -> bool:
        return kind in self.outputs

    @property
    def loads_model(self) -> bool:
        """Whether a diffusion model comes from here, out of a file."""
        return self.gives("MODEL") and not self.takes("MODEL") and self.type != "Reroute"

    @property
    def samples(self) -> bool:
        return self.gives("LATENT") and (self.takes("MODEL") or self.takes("GUIDER"))

    def upstream(self, kinds: Iterable[str]) -> list[Node]:
        """Every node that this one depends on by links of these types, itself included, nearest first."""
        kinds = set(kinds)
        found: dict[Node, None] = {self: None}
        for node in (queue := [self]):
            for source, kind in node.sources.values():
                if kind in kinds and source not in found:
                    found[source] = None
                    queue.append(source)
        return list(found)


@dataclass(frozen=True)
class Template:
    name: str
    nodes: list[Node]

    @property
    def samplers(self) -> list[Node]:
        """Every node that samples with a model that is loaded from a file."""
        return [node for node in self.nodes if node.samples and any(up.loads_model for up in node.upstream(MODEL_TYPES))]


def installed() -> Iterator[Template]:
    """Every installed template, by name."""
    folder = resources.files(PACKAGE) / "templates"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            workflow = json.loads(file.read_text(encoding="utf-8"))
            if "nodes" in workflow:
                yield Template(file.name.removesuffix(".json"), read(workflow))


def read(workflow: Json) -> list[Node]:
    """All real nodes of a workflow, linked."""
    definitions = {definition["id"]: definition for definition in workflow.get("definitions", {}).get("subgraphs", [])}
    return _Scope(workflow, definitions).link()


class _Scope:
    """One graph: the workflow, or what stands in it for one subgraph node.

    Args:
        graph: the workflow or the subgraph's definition.
        definitions: all subgraphs, by the type that their nodes have.
        parent: the scope around, and the node there.
    """

    def __init__(self, graph: Json, definitions: dict[str, Json], parent: tuple[_Scope, Json] | None = None) -> None:
        self.graph, self.parent = graph, parent
        self.links = {link["id"]: link for link in map(_link, graph["links"])}
        self.raw = {node["id"]: node for node in graph["nodes"]}
        self.inner = {
            node["id"]: _Scope(definitions[node["type"]], definitions, (self, node))
            for node in graph["nodes"]
            if node["type"] in definitions
        }
        self.nodes = {number: _node(node) for number, node in self.raw.items() if number not in self.inner}

    def link(self) -> list[Node]:
        """Set the sources of all nodes, here and below, and return them."""
        for number, node in self.nodes.items():
            for socket in self.raw[number].get("inputs") or []:
                source = self.origin(socket.get("link"))
                if source is not None:
                    node.sources[socket["name"]] = source
        return [*self.nodes.values(), *(node for scope in self.inner.values() for node in scope.link())]

    def origin(self, number: int | None) -> tuple[Node, str] | None:
        """The real node that a link starts from, and the type of what it carries."""
        link = self.links.get(number)
        if link is None:
            return None
        start, slot = link["origin_id"], link["origin_slot"]
        if start == INSIDE:
            if self.parent is None:
                return None
            around, instance = self.parent
            name = self.graph["inputs"][slot]["name"]
            return next((around.origin(item["link"]) for item in instance.get("inputs") or [] if item["name"] == name), None)
        if start in self.inner:
            scope = self.inner[start]
            ends = [end for end, item in scope.links.items() if (item["target_id"], item["target_slot"]) == (OUTSIDE, slot)]
            return scope.origin(ends[0]) if ends else None
        outputs = self.nodes[start].outputs
        return self.nodes[start], outputs[slot] if outputs[slot] != "*" else link["type"]


def _link(link: list[Any] | Json) -> Json:
    if isinstance(link, dict):
        return link
    return dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), link, strict=False))


def _node(node: Json) -> Node:
    values = node.get("widgets_values") or []
    return Node(
        type=node["type"],
        inputs={socket["name"]: str(socket["type"]) for socket in node.get("inputs") or []},
        outputs=[str(socket["type"]) for socket in node.get("outputs") or []],
        widgets=list(values.values() if isinstance(values, dict) else values),
    )
