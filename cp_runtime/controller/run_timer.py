"""How long the calls of a sampling run take, measured alike on one device and on several, so that both can be compared."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

from ..nested import tensors


class RunTimer:
    """The calls of one sampling run.

    Args:
        key: of the model's file; None = its loader left no recipe.
        device: on which the model would run alone, in words.

    Attributes:
        kind: model file and shapes of what a call was given, the same for all calls; None where they differ, or without a key. Runs
            of one kind take the same time.
        calls: that have begun.
        done: calls that have returned.
    """

    def __init__(self, key: str | None, device: str = "") -> None:
        self.calls = self.done = 0
        self.kind: str | None = None
        self.device = device
        self._key = key
        self._first = self._second = self._last = self._ended = 0.0
        self._inside = 0.0  # seconds in which the ranks, or their owner, were busy with the calls that have ended
        self._extra = 0.0  # of these, since the second call, seconds that belong to no call

    def enter(self, arguments: dict[str, Any]) -> None:
        """A call begins."""
        kind = None if self._key is None else hashlib.sha256(repr((self._key, *_shapes(arguments))).encode()).hexdigest()[:16]
        self.calls += 1
        self.kind = kind if self.calls == 1 or kind == self.kind else None
        self._last = time.monotonic()
        if self.calls == 1:
            self._first = self._last
        elif self.calls == 2:
            self._second = self._last

    def leave(self) -> None:
        """The call has returned. A device may still compute it."""
        self.done, self._ended = self.calls, time.monotonic()

    def finish(self) -> None:
        """The result of the run is there."""
        self._ended = time.monotonic()

    def inside(self, seconds: float, extra: float = 0.0) -> None:
        """The ranks have run a call of this run.

        Args:
            seconds: from the call to its result, whatever came in between.
            extra: of these, seconds that belong to no call of the run.
        """
        self._inside += seconds
        self._extra += extra if self.calls > 1 else 0.0

    @property
    def between(self) -> float:
        """Seconds from the end of a call on the ranks to the begin of the next, mean over the calls so far."""
        return max(0.0, self._last - self._first - self._inside) / max(1, self.calls - 1)

    @property
    def per_call(self) -> float | None:
        """Seconds per call, from the begin of the second one on: the first loads and warms up. None where there were too few."""
        return (self._ended - self._second - self._extra) / (self.done - 1) if self.done > 1 else None


def _shapes(arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in sorted(arguments.items()):
        for tensor in tensors(value):
            yield name, *tensor.shape
