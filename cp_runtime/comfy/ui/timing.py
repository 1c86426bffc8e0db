"""Has the sampling runs of a model measured, whether it computes on one device or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

from ...errors import MirrorError, UnsupportedError
from .recipes import recipe_of
from .run_timer import RunTimer

TIMER = "context_parallel_timer"


def time_calls(patcher: Any, begin: Callable[[RunTimer], None]) -> None:
    """Have every sampling run with this ModelPatcher measured.

    Args:
        begin: gets the timer when a run begins.
    """

    timer = RunTimer(None)

    def prepare(executor: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal timer
        timer = RunTimer(recipe_key(model))
        begin(timer)
        return executor(model, *args, **kwargs)

    def call(
        executor: Callable[..., Any], x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Not the text: its length varies with every prompt and hardly counts.
        timer.enter({"x": x, "concat": c_concat, "control": control, **kwargs})
        return executor(x, t, c_concat, c_crossattn, control, *args, **kwargs)

    stop_timing(patcher)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, TIMER, prepare)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, TIMER, call)


def stop_timing(patcher: Any) -> None:
    """Undo `time_calls`, if it was done."""
    for kind in (WrappersMP.PREPARE_SAMPLING, WrappersMP.APPLY_MODEL):
        patcher.remove_wrappers_with_key(kind, TIMER)


def recipe_key(patcher: Any) -> str | None:
    """Key of a model's file, None where its loader left no recipe that workers could follow."""
    with contextlib.suppress(MirrorError, UnsupportedError):
        return recipe_of(patcher).key
    return None
