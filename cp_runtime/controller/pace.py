"""How often ranks look for Cancel: between blocks of slow calls, and as seldom as does, for each look waits for the device."""

from __future__ import annotations

from collections.abc import Hashable

SLOW_CALL = 0.5  # seconds; a call that may be slower can be cancelled between blocks
CHECK_INTERVAL = 0.125  # seconds between two polls for Cancel on the ranks; they leave at the second one
KINDS = 64


class Pace:
    """How fast the last call of every kind was. The oldest of many kinds are forgotten."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}

    def note(self, kind: Hashable, ranks: int, seconds: float, modules: int) -> None:
        """A call has ended.

        Args:
            kind: its model and shapes.
            ranks: how many shared the work.
            modules: the planned ones that a rank passed.
        """
        self._last.pop(kind, None)
        self._last[kind] = seconds * ranks, modules
        if len(self._last) > KINDS:
            del self._last[next(iter(self._last))]

    def modules(self, kind: Hashable) -> int:
        """How many planned modules a rank passed; 0 = nobody knows."""
        return self._last.get(kind, (0.0, 0))[1]

    def modules_per_check(self, kind: Hashable, ranks: int) -> int:
        """How many planned modules so many ranks may pass between two polls for Cancel; 0 = they need not poll."""
        if kind not in self._last:
            return 1
        work, modules = self._last[kind]
        return max(1, int(modules * CHECK_INTERVAL * ranks / work)) if work > SLOW_CALL * ranks else 0
