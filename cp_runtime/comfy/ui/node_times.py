"""The seconds of a prompt's nodes, from ComfyUI's own events, for `PromptTimes`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import cache
from typing import Any

import nodes
from comfy_execution.progress import ProgressHandler, ProgressRegistry

from ...controller.prompt_times import DENOISING, LOADING, OTHER, TEXT, UPSCALING, VAE, PromptTimes
from .runtime import CONTROLLER

MODELS = {"MODEL", "CLIP", "VAE", "CLIP_VISION", "CONTROL_NET", "STYLE_MODEL", "UPSCALE_MODEL"}
"""Types of sockets: a node that has one as an output, and does nothing else, loads."""
PICTURES = {"IMAGE", "LATENT", "AUDIO", "VIDEO"}


class NodeTimes(ProgressHandler):
    """Notes the nodes of one prompt. `registry`: ComfyUI's, of the prompt."""

    def __init__(self, registry: ProgressRegistry) -> None:
        super().__init__("context parallel")
        self._graph, self._times = registry.dynprompt, PromptTimes(registry.prompt_id)
        CONTROLLER.journal.prompt = self._times

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self._times.enter(part_of(self._graph.get_node(node_id)["class_type"]))

    def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self._times.leave()


def watch_nodes() -> None:
    """Have every prompt's registry of progress note its nodes, with or without a browser that waits for it. Call it once."""
    stock = ProgressRegistry.__init__

    @functools.wraps(stock)
    def init(self: ProgressRegistry, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.register_handler(NodeTimes(self))

    ProgressRegistry.__init__ = init


@cache
def part_of(class_type: str) -> str:
    """Return the part of a prompt that a class of nodes belongs to, by the types of its sockets."""
    cls = nodes.NODE_CLASS_MAPPINGS.get(class_type)
    if cls is None:
        return OTHER
    taken, given = input_types(cls), set(map(str, cls.RETURN_TYPES or ()))
    if taken & {"MODEL", "GUIDER"} and given & PICTURES:
        return DENOISING
    if "VAE" in taken and given & PICTURES:
        return VAE
    if "UPSCALE_MODEL" in taken and given & PICTURES:
        return UPSCALING
    if taken & {"CLIP", "CLIP_VISION"} and "CONDITIONING" in given:
        return TEXT
    return LOADING if given & MODELS else OTHER


def input_types(cls: Any) -> set[str]:
    """Return the types of a node's inputs; combos have none."""
    groups: Mapping[str, Any] = cls.INPUT_TYPES()
    inputs = [each for group in ("required", "optional") for each in (groups.get(group) or {}).values()]
    return {each[0] for each in inputs if each and isinstance(each[0], str)}
