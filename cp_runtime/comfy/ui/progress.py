"""Cancel and ComfyUI's progress bar while the ranks are at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.utils

from ...pool.worker_pool import CallCancelled
from .runtime import CONTROLLER

QUIET = 1.0  # seconds of loading before it is worth a bar; samplers count their steps with the same one
FULL = 100


def with_cancel(run: Callable[[Callable[[], bool]], Any], bar: WorkBar | None = None) -> Any:
    """Run a function on the workers that polls for Cancel; a cancelled command of the pool becomes ComfyUI's interrupt. `bar`: has
    the progress shown; None = one without steps."""
    try:
        return run((bar or WorkBar()).poll)
    except CallCancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise comfy.model_management.InterruptProcessingException from None


class WorkBar:
    """ComfyUI's progress bar of a node: the loaded percentage of a model, and the steps of a call, or of several.

    Args:
        steps: of all calls; 0 = unknown, or counted by the caller.

    Attributes:
        before: steps of earlier calls.
    """

    def __init__(self, steps: int = 0) -> None:
        self.before = self._done = 0
        self._hook = comfy.utils.PROGRESS_BAR_HOOK
        self._bar = self._new(steps) if steps else None
        self._began: float | None = None
        self._shown: int | None = None  # percentage

    def poll(self) -> bool:
        """Show the ranks' progress; a bar returns to the start when loading ends. Return whether the user has cancelled."""
        if comfy.model_management.processing_interrupted():
            return True
        workers = CONTROLLER.workers
        loaded, done = (None, 0) if workers is None else (workers.loaded, self.before + workers.modules)
        if loaded is None:
            value, self._began = (None if self._shown is None else 0), None
        else:
            self._began = self._began or time.monotonic()
            value = round(FULL * loaded) if time.monotonic() - self._began >= QUIET else None
        try:
            if value not in (None, self._shown):
                self._new(FULL).update_absolute(value)  # a new one shows its first value at once
                self._shown = value
            if self._bar is not None and done > self._done:
                self._done = done
                self._bar.update_absolute(done)
        except comfy.model_management.InterruptProcessingException:  # cancelled since
            return True
        return False

    def _new(self, steps: int) -> Any:
        bar = comfy.utils.ProgressBar(steps)
        bar.hook = self._hook
        return bar
