"""The seconds of a prompt's nodes, from ComfyUI's own events, for `PromptTimes`."""

from __future__ import annotations

import functools
from typing import Any

import nodes
from comfy_execution.progress import ProgressHandler, ProgressRegistry

from ...controller.prompt_times import PromptTimes
from .node_parts import part_of
from .runtime import CONTROLLER

PACK = __name__.partition(".cp_runtime.")[0]


class NodeTimes(ProgressHandler):
    """Notes the nodes of one prompt. `registry`: ComfyUI's, of the prompt."""

    def __init__(self, registry: ProgressRegistry) -> None:
        super().__init__("context parallel")
        self._graph, self._times = registry.dynprompt, PromptTimes(registry.prompt_id)
        classes = {self._graph.get_node(node_id)["class_type"] for node_id in self._graph.all_node_ids()}
        CONTROLLER.journal.begin_prompt(self._times, any(map(is_own, classes)))

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        cls = nodes.NODE_CLASS_MAPPINGS.get(self._graph.get_node(node_id)["class_type"])
        self._times.enter(part_of(cls))

    def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self._times.leave()


def is_own(class_type: str) -> bool:
    """Return whether nodes of a type are of this pack."""
    return getattr(nodes.NODE_CLASS_MAPPINGS.get(class_type), "__module__", "").startswith(f"{PACK}.")


def watch_nodes() -> None:
    """Have every prompt's registry of progress note its nodes, with or without a browser that waits for it. Call it once."""
    stock = ProgressRegistry.__init__

    @functools.wraps(stock)
    def init(self: ProgressRegistry, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.register_handler(NodeTimes(self))

    ProgressRegistry.__init__ = init
