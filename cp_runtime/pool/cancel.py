"""How all ranks of a call leave it at one place, or none does."""

from __future__ import annotations

import threading


class CancelPoints:
    """The numbered places of a call (1, 2, ...) as one rank passes them: planned modules, or runs of a forward in stages.

    When the user cancels, every rank reports how far it is, and stops at the next place until it knows where all leave: at the
    place after the farthest. Ranks that are behind go on to there. A call that nobody cancels has no message. The thread that reads
    messages calls `ask` and `decide`, so a rank that waits inside a collective answers, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin with the next call."""
        self._arrived, self._pledged, self._stops = 0, 0, False
        self._decided, self._place = threading.Event(), 0

    def ask(self) -> int:
        """Stop this rank behind the last place that it passes for sure, and return that."""
        # Under one lock with `leave`: either this rank counts the next place before it answers, or it stops there.
        with self._lock:
            self._stops = True
            return max(self._arrived, self._pledged)

    def decide(self, place: int) -> None:
        """Note where all ranks leave."""
        self._place = place
        self._decided.set()

    def leave(self) -> bool:
        """Arrive at the next place. Return whether to leave there, alike on all ranks."""
        with self._lock:
            self._arrived += 1
            if not self._stops or self._arrived <= self._pledged:
                return False
        # Without a limit: when the time for Cancel is up, the controller kills all ranks.
        self._decided.wait()
        return self._arrived == self._place

    def pledge(self) -> bool:
        """Return whether all ranks are sure to pass the place after the last one: this rank will."""
        with self._lock:
            if not self._stops:
                self._pledged = self._arrived + 1
            return self._arrived < self._pledged or (self._decided.is_set() and self._place > self._arrived + 1)
