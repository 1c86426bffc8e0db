"""What a rank ran out of memory with. That may have ended the pool, so the owner of the pool keeps it."""

from __future__ import annotations

from typing import Any

LIMIT = 256  # models and kinds of calls


class Shortages:
    """Placements of models, and splits of calls, that take more memory than the devices have. The oldest of many are forgotten."""

    def __init__(self) -> None:
        self._tried: dict[tuple[tuple[str, ...], str], frozenset[Any]] = {}

    def note(self, devices: tuple[str, ...], name: str, tried: Any) -> None:
        """A rank ran out of memory.

        Args:
            devices: of all ranks.
            name: key of the model, or kind of the call.
            tried: the placement that the model had, or the split that the call ran on.
        """
        found = self._tried.pop((devices, name), frozenset())
        self._tried[devices, name] = found | {tried}
        while len(self._tried) > LIMIT:
            del self._tried[next(iter(self._tried))]

    def of(self, devices: tuple[str, ...], name: str) -> frozenset[Any]:
        """What was tried in vain with a model or a kind of call."""
        return self._tried.get((devices, name), frozenset())

    def forget(self) -> None:
        """The user begins anew, perhaps with more memory."""
        self._tried.clear()
