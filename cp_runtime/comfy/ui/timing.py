"""How long the calls of a sampling run take, measured alike on one device and on several, so that both can be compared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from comfy.patcher_extension import WrappersMP

from ...errors import MirrorError, UnsupportedError
from ...nested import tensors
from .recipes import recipe_of

TIMER = "context_parallel_timer"


class RunTimer:
    """The calls of one sampling run.

    Attributes:
        kind: model file and shapes of what a call was given, the same for all calls; None where they differ, or the model's loader
            left no recipe. Runs of one kind take the same time.
    """

    def __init__(self, key: str | None) -> None:
        self.calls = 0
        self.kind: Any = None
        self._key = key
        self._second = self._last = 0.0

    def enter(self, arguments: dict[str, Any]) -> None:
        """A call begins."""
        shapes = tuple(_shapes(arguments))
        kind = None if self._key is None else (self._key, shapes)
        self.calls += 1
        self.kind = kind if self.calls == 1 or kind == self.kind else None
        self._last = time.monotonic()
        if self.calls == 2:
            self._second = self._last

    def per_call(self, ended: float | None = None) -> float | None:
        """Seconds from one call to the next, without the first one, which loads and warms up. None where there were too few.

        Args:
            ended: when the result of the run was in host memory; None = the run goes on. A device may still compute when a call
                returns.
        """
        calls = self.calls - (2 if ended is None else 1)
        return ((self._last if ended is None else ended) - self._second) / calls if calls > 0 else None


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


def _shapes(arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in sorted(arguments.items()):
        for tensor in tensors(value):
            yield name, *tensor.shape
