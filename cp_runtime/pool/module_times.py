"""How long planned modules take, as seen from outside: a rank counts each one that it enters."""

from __future__ import annotations

from collections.abc import Mapping

from .collection import SUSPENDED


class ModuleTimes:
    """The longest time between two modules of a command. The one that a rank is in does not count: it may hang there.

    On an accelerator a rank may enter many at once and wait for the last of them: that wait is how long it may take to leave.
    """

    def __init__(self) -> None:
        self.longest = 0.0  # seconds
        self._entered: dict[int, tuple[int, float]] = {}  # rank -> (modules, when it entered the last)
        self._last = 0.0

    def note(self, modules: Mapping[int, int], now: float) -> None:
        """Look at the counts by rank, many times a second. A longer gap means that this process was suspended: it starts over."""
        if now - self._last > SUSPENDED:
            self._entered.clear()
        self._last = now
        for rank, count in modules.items():
            before, at = self._entered.get(rank, (0, now))
            if count > before:
                self.longest = max(self.longest, now - at)
                self._entered[rank] = count, now
