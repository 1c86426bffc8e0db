"""ComfyUI's progress bar of a node, while the ranks load the model that the node waits for."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils

QUIET = 1.0  # seconds that loading takes before it is worth a bar; samplers count their steps with the same one
FULL = 100


class LoadingBar:
    """Shows per cent. To be used in the thread that executes the node."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._shown: int | None = None

    def show(self, loaded: float | None) -> bool:
        """Show this part of 1, or take the bar back to its begin where nothing is loaded (any more).

        Returns:
            whether the user has cancelled.
        """
        if comfy.model_management.processing_interrupted():
            return True
        if loaded is None:
            value, self._began = (None if self._shown is None else 0), None
        else:
            self._began = self._began or time.monotonic()
            value = round(FULL * loaded) if time.monotonic() - self._began >= QUIET else None
        try:
            if value not in (None, self._shown):
                comfy.utils.ProgressBar(FULL).update_absolute(value)  # a new one shows its first value at once
                self._shown = value
        except comfy.model_management.InterruptProcessingException:  # cancelled since
            return True
        return False
