"""The node of a graph that waits for the ranks: which one it is, its progress bar, and Cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.utils
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context

from ...controller.run_stats import Node
from ...errors import UnsupportedError
from ...pool.config import RuntimeConfig
from ...pool.worker_pool import CallCancelled
from ..ranks.ui import CONTROLLER

log = logging.getLogger("context_parallel")

QUIET = 1.0  # seconds that loading takes before it is worth a bar; samplers count their steps with the same one
FULL = 100


def executing_node() -> Node | None:
    """Return the node of the graph that runs in this thread."""
    context = get_executing_context()
    if context is None:
        return None
    graph = get_progress_state().dynprompt
    kind = graph.get_node(context.node_id)["class_type"] if graph.has_node(context.node_id) else None
    return Node(context.prompt_id, context.node_id, kind)


def raise_or_warn(error: UnsupportedError, config: RuntimeConfig, instead: str, raised_by: str = "") -> None:
    """Raise an error with which a run is refused, and record it in the status; or log a warning, as on_unsupported says.

    Args:
        instead: what happens where nothing is raised, for the log.
        raised_by: the node that raises, in front of the error's text.
    """
    if config.on_unsupported == "error":
        error = UnsupportedError(f"{raised_by}: {error}") if raised_by else error
        CONTROLLER.journal.fail(error, executing_node())
        raise error from None
    log.warning("%s: %s", instead, error)


def with_cancel(run: Callable[[Callable[[], bool]], Any], steps: int = 0) -> Any:
    """Run something on the workers that polls for Cancel; a cancelled command of the pool becomes ComfyUI's interrupt. `steps`: of
    the call, shown with every poll; 0 = they are not known, or the caller counts them."""
    try:
        return run(WorkBar(steps).poll)
    except CallCancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise comfy.model_management.InterruptProcessingException from None


class WorkBar:
    """ComfyUI's progress bar of a node: the loaded percentage of a model, and the steps of a call."""

    def __init__(self, steps: int) -> None:
        self._done = 0
        self._bar = comfy.utils.ProgressBar(steps) if steps else None
        self._began: float | None = None
        self._shown: int | None = None  # percentage

    def poll(self) -> bool:
        """Show how far the ranks are; a bar goes back to the start when no model is loaded any more. Return whether the user has
        cancelled."""
        if comfy.model_management.processing_interrupted():
            return True
        workers = CONTROLLER.workers
        loaded, done = (None, 0) if workers is None else (workers.loaded, workers.modules)
        if loaded is None:
            value, self._began = (None if self._shown is None else 0), None
        else:
            self._began = self._began or time.monotonic()
            value = round(FULL * loaded) if time.monotonic() - self._began >= QUIET else None
        try:
            if value not in (None, self._shown):
                comfy.utils.ProgressBar(FULL).update_absolute(value)  # a new one shows its first value at once
                self._shown = value
            if self._bar is not None and done > self._done:
                self._done = done
                self._bar.update_absolute(done)
        except comfy.model_management.InterruptProcessingException:  # cancelled since
            return True
        return False
