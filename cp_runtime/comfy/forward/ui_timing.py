"""Measure a model's sampling runs, whether on one device or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from ...controller.run_stats import RunStats
from ...engine.measuring import device_name
from ...errors import MirrorError, UnsupportedError
from ..model.ui_recipes import recipe_of
from ..ranks.ui import CONTROLLER

TIMER = "context_parallel_timer"
_KINDS = (WrappersMP.PREPARE_SAMPLING, WrappersMP.OUTER_SAMPLE, WrappersMP.APPLY_MODEL)


def time_calls(patcher: Any, device: str) -> None:
    """Have every sampling run with this ModelPatcher measured, for the journal.

    Args:
        device: torch's name of the device that would compute it alone.
    """

    timer = RunStats(None)

    def prepare(executor: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal timer
        timer = RunStats(recipe_key(model), device_name(torch.device(device)))
        CONTROLLER.journal.run = timer
        return executor(model, *args, **kwargs)

    def sample(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = executor(*args, **kwargs)
        if CONTROLLER.journal.run is timer:
            if timer.last is None:  # ranks are done when they return
                comfy.model_management.synchronize()
            CONTROLLER.journal.end_run()
        return out

    def call(
        executor: Callable[..., Any], x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Without the text, whose length varies with every prompt and hardly matters.
        timer.enter({"x": x, "concat": c_concat, "control": control, **kwargs})
        out = executor(x, t, c_concat, c_crossattn, control, *args, **kwargs)
        timer.leave()
        return out

    stop_timing(patcher)
    for kind, wrapper in zip(_KINDS, (prepare, sample, call), strict=True):
        patcher.add_wrapper_with_key(kind, TIMER, wrapper)


def stop_timing(patcher: Any) -> None:
    """Undo `time_calls`, if it was done."""
    for kind in _KINDS:
        patcher.remove_wrappers_with_key(kind, TIMER)


def recipe_key(patcher: Any) -> str | None:
    """Return the key of a model's file, or None if its loader left no recipe that workers could follow."""
    with contextlib.suppress(MirrorError, UnsupportedError):
        return recipe_of(patcher).key
    return None
