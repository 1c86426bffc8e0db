"""ComfyUI's installed workflow templates as graphs, and what reaches each of their samplers.

A template is what the browser saves: nodes with typed sockets, links by number, and subgraphs that stand in one node for a graph
of their own. Subgraphs are looked through, so that a link always leads to a real node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

PACKAGE = "comfyui_workflow_templates_json"
INSIDE, OUTSIDE = -10, -20
"""The nodes that stand, inside a subgraph, for its inputs and for its outputs."""
MODEL_TYPES = frozenset({"MODEL", "GUIDER"})
FOLLOWED = MODEL_TYPES | {
    "CONDITIONING", "LATENT", "SAMPLER", "CONTROL_NET", "MODEL_PATCH", "STYLE_MODEL", "LATENT_OPERATION", "HOOKS",
}  # fmt: skip
"""Types of links that carry something of the forward's. Noise and sigmas are numbers of the UI process; images, texts and what
vision and audio encoders make of them are values in a conditioning, and the node that puts them there is followed."""
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")

Json = dict[str, Any]


@dataclass(eq=False)
class Node:
    """A node where it stands: one in a subgraph that is used twice is two of these.

    Args:
        takes, gives: types of its inputs and outputs.
        widgets: the values that the node holds itself.
        sources: node and type of the output that each linked input takes its value from.
    """

    type: str
    takes: list[str]
    gives: list[str]
    widgets: list[Any]
    sources: list[tuple[Node, str]] = field(default_factory=list, repr=False)

    @property
    def loads_model(self) -> bool:
        """Whether a diffusion model comes from here, out of a file."""
        return "MODEL" in self.gives and "MODEL" not in self.takes and self.type != "Reroute"

    @property
    def samples(self) -> bool:
        return "LATENT" in self.gives and not MODEL_TYPES.isdisjoint(self.takes)

    def upstream(self, kinds: Iterable[str]) -> list[Node]:
        """Every node that this one depends on by links of these types, itself included, nearest first."""
        kinds = set(kinds)
        found = {self: None}
        for node in (queue := [self]):
            new = dict.fromkeys(source for source, kind in node.sources if kind in kinds and source not in found)
            found |= new
            queue += new
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
    return templates_in(Path(str(resources.files(PACKAGE))) / "templates")


def templates_in(folder: Path) -> Iterator[Template]:
    """Every template in a folder, by name."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            workflow = json.loads(file.read_text(encoding="utf-8"))
            if "nodes" in workflow:
                subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
                scope = _Scope(workflow, {definition["id"]: definition for definition in subgraphs})
                yield Template(file.name.removesuffix(".json"), scope.linked())


class _Scope:
    """One graph: the workflow, or what stands in it for one subgraph node.

    Args:
        graph: the workflow or the subgraph's definition.
        definitions: all subgraphs, by the type that their nodes have.
        parent: the scope around, and the node there.
    """

    def __init__(self, graph: Json, definitions: dict[str, Json], parent: tuple[_Scope, Json] | None = None) -> None:
        self.graph, self.parent = graph, parent
        links = (link if isinstance(link, dict) else dict(zip(LINK, link, strict=False)) for link in graph["links"])
        self.links = {link["id"]: link for link in links}
        self.inner: dict[int, _Scope] = {}
        self.nodes: dict[int, tuple[Node, Json]] = {}
        for raw in graph["nodes"]:
            if raw["type"] in definitions:
                self.inner[raw["id"]] = _Scope(definitions[raw["type"]], definitions, (self, raw))
            else:
                takes, gives = ([str(socket["type"]) for socket in raw.get(name) or []] for name in ("inputs", "outputs"))
                values = raw.get("widgets_values") or []
                widgets = list(values.values() if isinstance(values, dict) else values)
                self.nodes[raw["id"]] = Node(raw["type"], takes, gives, widgets), raw

    def linked(self) -> list[Node]:
        """Return all nodes, here and below, with their sources."""
        for node, raw in self.nodes.values():
            origins = (self.origin(socket.get("link")) for socket in raw.get("inputs") or [])
            node.sources = [origin for origin in origins if origin is not None]
        return [*(node for node, _ in self.nodes.values()), *(node for scope in self.inner.values() for node in scope.linked())]

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
        node, _ = self.nodes[start]
        return node, node.gives[slot] if node.gives[slot] != "*" else link["type"]
