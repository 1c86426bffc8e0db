"""All ranks leave a call at the same place, and none waits for another to find out."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

_NEVER = 2**62
_POLL = 0.001


class CancelPoints:
    """Numbered places of a call (1, 2, ...) at which all ranks leave it, or none does.

    At each place rank 0 decides about the *next* one, so that the decision lies there before the others arrive: they wait only
    when they are a whole interval ahead of rank 0. Waiting at every place would add up the differences in speed between ranks
    that a batch axis lets run apart.

    Args:
        word: one int64 in memory that all ranks map. Its absolute value is the last place that rank 0 has passed; where it is
            negative, all leave at the place after that.
        rank: this rank.
    """

    def __init__(self, word: Tensor, rank: int) -> None:
        self._word, self._rank, self._passed = word, rank, 0

    def restart(self) -> None:
        """A call begins. Rank 0 does so before it tells the others of the call."""
        self._passed = 0
        if self._rank == 0:
            self._word.zero_()

    def leave(self, asked: Callable[[], bool]) -> bool:
        """Whether to leave at this place, the same answer on all ranks.

        Args:
            asked: whether the user cancelled; called by rank 0.
        """
        before, self._passed = self._passed, self._passed + 1
        while abs(decision := int(self._word)) < before:
            time.sleep(_POLL)
        if before and decision == -before:
            return True
        if self._rank == 0:
            self._word.fill_(-self._passed if asked() else self._passed)
        return False

    def end(self) -> None:
        """This rank has left the call. After rank 0, whatever the reason, nothing new is decided and nobody waits."""
        if self._rank == 0 and int(self._word) >= 0:
            self._word.fill_(_NEVER)
