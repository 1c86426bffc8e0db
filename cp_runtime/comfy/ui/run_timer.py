"""How long the calls of a sampling run take, measured alike on one device and on several, so that both can be compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ...nested import tensors


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


def _shapes(arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in sorted(arguments.items()):
        for tensor in tensors(value):
            yield name, *tensor.shape
