"""Progress of a rank that brings a model's weights to its device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ...nested import stored


class LoadProgress:
    """Counts bytes of weights that are patched and there, or on their way.

    Args:
        tell: told how many thousandths of a model that is, and None once it is loaded.
    """

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        self._tell = tell
        self._done = self._of = 0

    @contextlib.contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """Tell the progress of a load that happens inside the context. `nbytes`: of the model's weights."""
        self._done, self._of = 0, nbytes
        self._tell(0)
        try:
            yield
        finally:
            self._tell(None)

    def add(self, weights: Iterable[Tensor]) -> None:
        """Note that these weights are loaded."""
        self._done += sum(part.nbytes for weight in weights for part in stored(weight))
        self._tell(min(1000, 1000 * self._done // max(1, self._of)))
