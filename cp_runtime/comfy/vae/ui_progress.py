"""ComfyUI's progress bar of a node, while the ranks decode or encode."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import comfy.model_management
import comfy.utils

MOST = 64  # kinds of calls whose step counts are remembered
_steps: dict[Any, int] = {}


class StepBar:
    """Shows how many steps the slowest rank has done: tiles, or convolutions once a call of this kind has counted them.

    Args:
        ranks: number of ranks of the pool.
        tiles: number of tiles of the call; None = no tiles.
        kind: kind of the call; calls of a kind take equally many steps.
    """

    def __init__(self, ranks: int, tiles: int | None, kind: Any) -> None:
        self._ranks, self._kind = ranks, kind
        self._total = _steps.get(kind) if tiles is None else math.ceil(tiles / ranks)
        self._bar = comfy.utils.ProgressBar(self._total) if self._total else None
        self._shown = 0

    def show(self, workers: Any) -> bool:
        """Show what is done. Return whether the user has cancelled."""
        if comfy.model_management.processing_interrupted():
            return True
        if self._bar is None or workers is None or workers.pool.doing != "call":
            return False
        done = min((workers.pool.progress(rank).modules for rank in range(self._ranks)), default=0)
        if done > self._shown:
            self._shown = done
            with contextlib.suppress(comfy.model_management.InterruptProcessingException):  # the next call returns it
                self._bar.update_absolute(done)
        return False

    def done(self, workers: Any) -> None:
        """Remember the number of steps of a call that has ended well."""
        record = None if workers is None else workers.last_call
        if record is not None:
            _steps.pop(self._kind, None)
            _steps[self._kind] = record.reports[0].modules
            if len(_steps) > MOST:
                del _steps[next(iter(_steps))]
