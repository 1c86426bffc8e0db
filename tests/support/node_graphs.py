"""Graphs with ComfyUI's own nodes beside them, and what those need of encoders.

Encoders are stand-ins of a family's compression and width (`comfy_nodes/stand_ins.py`); the nodes under test are the real ones.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from cp_runtime.families import PLANS

from . import families
from .graphs import GUIDED_FLUX, Link, NodeSpec, Prompt, family_prompt, flux_prompt
from .latents import assert_close, differ
from .server import ComfyServer
from .server_events import Result

SERVED = families.served()

CHECKPOINT, IMAGE_ONLY = "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"
POSITIVE, NEGATIVE, LATENT = ["positive", 0], ["negative", 0], ["latent", 0]
IMAGE, MASK = ["image", 0], ["image", 1]
VIDEO, MASKS = ["video", 0], ["video", 1]
BOTH: dict[str, Link] = {"positive": ["node", 0], "negative": ["node", 1]}
ALL: dict[str, Link] = {**BOTH, "latent_image": ["node", 2]}

# Entries of a family's conditioning that are its text encoder's. The others come from the nodes under test.
OF_TEXT = ("attention_mask", "conditioning_byt5small", "conditioning_llama3", "pooled_output", "text_input_ids")


@dataclass(frozen=True)
class GraphCase:
    """A graph with nodes beside it.

    Args:
        graph: builder of the graph, or the name of a family, whose tiny model it samples for one step.
        nodes: by id; `node` is the one that the case is about. What a node requires and does not get here is filled in by
            `completed`.
        wiring: inputs of the sampler, or of its guider, from these nodes.
        settings: of the graph, see `graphs.sampling_prompt`.
        loader: class of the node that loads the model.
        change: what else is other than in the graph.
        matters: whether the latent must be another one without all this.
        since: first of the tested versions of ComfyUI that has the nodes; 0 = all have them.
        degrees: of CP Config, where it is not left to the pack how the sequence is split.
    """

    graph: str | Callable[..., Prompt]
    nodes: Mapping[str, NodeSpec] = field(default_factory=dict)
    wiring: Mapping[str, Link] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "UNETLoader"
    change: Callable[[Prompt], None] | None = None
    matters: bool = True
    since: str = "0"
    degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def served(self) -> str:
        """The entry of `support.families` whose checkpoint it needs."""
        return self.graph if isinstance(self.graph, str) else ""

    @property
    def shares_sequence(self) -> bool:
        """Whether ranks split the tokens of its model."""
        return not self.served or PLANS[SERVED[self.served][2].cls].shares_sequence

    def build(self, **settings: Any) -> Prompt:
        """The stock graph, or with `cp` the one with these inputs of CP Config."""
        prompt = self._graph(others=self.nodes, **self.settings, **settings)
        for sampler in {"sampler", "guider"} & prompt.keys():
            inputs = prompt[sampler]["inputs"]
            inputs.update({name: link for name, link in self.wiring.items() if name in inputs})
        if self.loader != "UNETLoader":
            inputs = {"ckpt_name": families.checkpoint_of(SERVED[self.served][1])}
            prompt["loader"] = {"class_type": self.loader, "inputs": inputs}
        if self.change is not None:
            self.change(prompt)
        return prompt

    def without(self) -> GraphCase:
        """The graph with the same settings and without any of these nodes."""
        settings = {name: value for name, value in self.settings.items() if name not in ("model_nodes", "after_apply")}
        return GraphCase(self.graph, settings=settings)

    def _graph(self, **settings: Any) -> Prompt:
        if not isinstance(self.graph, str):
            return self.graph(**settings)
        entry = SERVED[self.graph][1]
        if self.nodes:
            entry = replace(entry, cond={name: value for name, value in entry.cond.items() if name in OF_TEXT})
        return family_prompt(entry, **{"cfg": 3.0, "steps": 1, "node": "CPSampler", **settings})


@dataclass(frozen=True)
class NodeCase:
    """A node between loader and sampler.

    Args:
        node, inputs: of that node, besides its model and what `completed` fills in.
        graph: builder of the graph around it.
        others: nodes that it takes something from.
        matters: whether the latent must be another one without the node.
        served: whose checkpoint the graph needs.
    """

    node: str
    inputs: dict[str, Any] = field(default_factory=dict)
    graph: Callable[..., Prompt] = GUIDED_FLUX
    others: dict[str, NodeSpec] = field(default_factory=dict)
    matters: bool = True
    served: str = "sd15"

    def at(self, place: str) -> GraphCase:
        """The node before Apply Context Parallel (`model_nodes`), or behind it (`after_apply`)."""
        return GraphCase(self.graph, self.others, settings={place: [(self.node, self.inputs)]}, matters=self.matters)


def completed(prompt: Prompt, server: ComfyServer) -> Prompt:
    """The prompt with what its nodes require and it leaves out: the default of a widget, and the first output of the node whose id
    is the name of the input."""
    for each in prompt.values():
        for name, (kind, *more) in _required(server, each["class_type"]).items():
            settings = more[0] if more else {}
            options = settings.get("options", []) if kind == "COMBO" else kind if isinstance(kind, list) else []
            if "default" in settings or options:
                each["inputs"].setdefault(name, settings["default"] if "default" in settings else options[0])
            elif name in prompt:
                each["inputs"].setdefault(name, [name, 0])
    return prompt


@functools.cache
def _required(server: ComfyServer, class_type: str) -> dict[str, list[Any]]:
    """Type and settings of a node's required inputs."""
    return server.object_info(class_type)[class_type]["input"].get("required", {})


def here(cases: Mapping[str, GraphCase]) -> dict[str, GraphCase]:
    """Those that the ComfyUI at hand has the nodes for."""
    return {name: case for name, case in cases.items() if families.exists(case.since)}


def assert_stock(server: ComfyServer, case: GraphCase, cp: Mapping[str, Any] | None = None) -> Result:
    """Check that ranks give the stock graph's latents, and that these are others than those without the nodes.

    Args:
        cp: inputs of CP Config; by default two ranks split the sequence, or the batch of a family without one to split.

    Returns:
        How the prompt on ranks ended.
    """
    expected = server.latents_once(completed(case.build(), server), timeout=300)
    cp = cp or {"world_size": 2, "batch_degree": 1 if case.shares_sequence else 0}
    result = server.run(completed(case.build(cp={**cp, **case.degrees}), server), timeout=300).check()
    if "report" in result.outputs:
        ranks, degrees = result.report["ranks"], result.report["degrees"]
        assert case.degrees.items() <= {f"{axis}_degree": degree for axis, degree in degrees.items()}.items()
        assert [rank["pid"] for rank in ranks] == server.worker_pids()
        assert not case.shares_sequence or all(any(rank["tokens"].values()) for rank in ranks), ranks
    out = server.latents(result)
    assert out.keys() == expected.keys()
    for name, stock in expected.items():
        assert_close(out[name], stock)
    if case.matters:
        plain = server.latents_once(case.without().build(), timeout=300)
        assert any(differ(plain[name], stock) for name, stock in expected.items())
    return result


def assert_right(server: ComfyServer, expected: Tensor, cp: Mapping[str, Any] | None = None, **settings: Any) -> list[int]:
    """Check what ranks sample of Flux, by default two; return their pids, which are in their order."""
    assert_close(server.sample(flux_prompt(cp=cp or {"world_size": 2}, **settings), timeout=120), expected)
    return server.worker_pids()


# --- nodes ------------------------------------------------------------------------------------------------------------


def node(class_type: str, **inputs: Any) -> NodeSpec:
    return class_type, inputs


def codec(channels: int, space: int = 8, time: int = 4) -> NodeSpec:
    """A VAE; `time` 0 is one of images."""
    return node("TestCodec", seed=2, channels=channels, space=space, time=time)


def picture(width: int, height: int, frames: int = 1, seed: int = 4) -> NodeSpec:
    return node("TestImage", seed=seed, width=width, height=height, frames=frames)


def two_controlnets(
    graph: str | Callable[..., Prompt], kind: str, form: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> GraphCase:
    """Two ControlNets of one kind of TestControlNet's, one behind the other. `form`: more of its inputs."""
    nodes: dict[str, NodeSpec] = {}
    pair = {"positive": POSITIVE, "negative": NEGATIVE}
    for number in range(2):
        loaded, hint, applied = f"control_net_{number}", f"hint_{number}", f"applied_{number}"
        nodes[loaded] = node("TestControlNet", model=["loader", 0], kind=kind, seed=number, **form)
        nodes[hint] = picture(80, 96, seed=5 + number)
        nodes[applied] = node("ControlNetApplyAdvanced", **pair, control_net=[loaded, 0], image=[hint, 0], strength=0.5)
        pair = {"positive": [applied, 0], "negative": [applied, 1]}
    return GraphCase(graph, nodes, pair, {"cfg": 4.0, **settings})


def vision(tokens: int = 257, width: int = 1280, seed: int = 3) -> NodeSpec:
    return node("TestVision", seed=seed, tokens=tokens, width=width)


def sound(**shapes: tuple[int, ...]) -> NodeSpec:
    return node("TestSound", seed=6, **{name: json.dumps(shape) for name, shape in shapes.items()})


def text(tokens: int, width: int, **extra: Any) -> NodeSpec:
    """A text encoder, with more entries of its conditioning as TestConditioning takes them."""
    return node("TestEncoder", tokens=tokens, width=width, extra=json.dumps(extra))


def latent(*shape: int, seed: int = 8, noise: float = 1.0) -> NodeSpec:
    return node("TestLatent", batch=1, shapes=json.dumps([shape]), noise=noise, seed=seed)
