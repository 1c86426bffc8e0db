"""ComfyUI's progress bar of a node, while the ranks load or compute what the node waits for."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils

QUIET = 1.0  # seconds that loading takes before it is worth a bar; samplers count their steps with the same one
FULL = 100


class WorkBar:
    """Shows the loaded percentage of a model, and the steps of a call. For the thread that executes the node. `steps`: of the call;
    0 = they are not known, or the caller counts them."""

    def __init__(self, steps: int = 0) -> None:
        self._steps, self._done = steps, 0
        self._bar = comfy.utils.ProgressBar(steps) if steps else None
        self._began: float | None = None
        self._loaded: int | None = None  # that is shown

    def show(self, loaded: float | None, done: int = 0) -> bool:
        """Show this part of a model, or move the bar back to the start if none is loaded (any more); and the steps that are
        done. Returns whether the user has cancelled."""
        if comfy.model_management.processing_interrupted():
            return True
        if loaded is None:
            value, self._began = (None if self._loaded is None else 0), None
        else:
            self._began = self._began or time.monotonic()
            value = round(FULL * loaded) if time.monotonic() - self._began >= QUIET else None
        try:
            if value not in (None, self._loaded):
                comfy.utils.ProgressBar(FULL).update_absolute(value)  # a new one shows its first value at once
                self._loaded = value
            if self._bar is not None and done > self._done:
                self._done = done
                self._bar.update_absolute(done)
        except comfy.model_management.InterruptProcessingException:  # cancelled since
            return True
        return False
