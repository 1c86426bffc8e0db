"""The number of ranks for a call: one, those of this computer, or all. Nothing is predicted: what may be fastest is run and timed.

The first call of a kind runs on all ranks. Where these are in several computers, the next one stays on this one. Short calls are
tried on one rank as well. What ran once runs once more before it is judged, as a first run warms up; then the least time decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ..engine.ranks.config import SequenceSettings
from ..engine.ranks.sharding import Shares
from ..recent import Recent
from .times import Times, digest, least

SHORT_CALL = 1.0  # seconds; a try of a longer call on one device costs more than it may gain, and Measure shows it on request
HOPELESS_RATIO = 2.0  # times the best: a first run slower than this is not repeated
WARM_UP = 2.0  # seconds of a first run on all ranks that it may have spent on connecting
MOST_KINDS = 192  # entries: a kind of call has up to three, one for each candidate


@dataclass(frozen=True)
class Ranks:
    """Candidate ranks for a call."""

    size: int
    most: int  # with the memory for the model, the first ones
    shares: Shares  # of all ranks
    settings: SequenceSettings
    batch_degree: int = 0  # groups set by the user; 0 = chosen
    sharded: bool = False  # every rank keeps a shard of the weights

    def largest_part(self, count: int) -> float:
        """Return the largest part of a call among so many ranks."""
        return max(self.shares[:count]) / sum(self.shares[:count]) if self.shares else 1 / count


class Chooser:
    """The choice of ranks for the calls of one pool.

    Args:
        machine: devices, driver, backend and shares, on which times depend.
        one_device: the same of one device.
        own: number of ranks on this computer; they are the first ones.
    """

    def __init__(self, times: Times, machine: object, one_device: str, own: int) -> None:
        self._times, self._machine, self._one_device, self._own = times, machine, one_device, own
        self._ran: Recent[tuple[str, str], int] = Recent(MOST_KINDS)  # runs since the ranks started, by kind and who computed it
        self._names: dict[object, str] = {}

    def who(self, ranks: Ranks, count: int) -> str:
        """Return the name of so many ranks in the table of times."""
        how = () if count == 1 else (ranks.settings, ranks.batch_degree)
        key = count, ranks.sharded, how
        if key not in self._names:
            self._names[key] = digest(*key, ranks.size, self._one_device if count == 1 else self._machine)
        return self._names[key]

    def candidates(self, ranks: Ranks) -> list[int]:
        """Return the numbers of ranks to choose from. With sharded weights all take part, if only to compute the same."""
        return sorted({1, ranks.most} if ranks.sharded else {1, min(self._own, ranks.most), ranks.most})

    def choose(self, kind: str, ranks: Ranks, can: Callable[[int], bool]) -> int:
        """Return the number of ranks for the next call. `can`: whether so many have the memory for it."""
        able = [count for count in reversed(self.candidates(ranks)) if count == ranks.most or can(count)]
        measured = self._measured(kind, ranks, able)
        shortest = min((seconds for seconds, _ in measured.values()), default=inf)
        # Largest first: all ranks, those of this computer, one.
        for count in able:
            if count not in measured and (count in (ranks.most, self._own) or shortest < SHORT_CALL):
                return count
        # A first run warms up, so nobody is judged by it who may still win.
        for count, (seconds, samples) in measured.items():
            cold = WARM_UP if count == ranks.most else 0.0
            if samples == 1 and seconds < HOPELESS_RATIO * shortest + cold:
                return count
        return min(measured, key=lambda count: measured[count])

    def note(self, kind: str, ranks: Ranks, count: int) -> None:
        """Record a run, whose time is in the table."""
        name = kind, self.who(ranks, count)
        self._ran[name] = self._ran.get(name, 0) + 1

    def compared(self, kind: str, ranks: Ranks) -> None:
        """Record that a call was repeated on one rank. It needs no second time: one device is no faster as a rule."""
        self._ran[kind, self.who(ranks, 1)] = 2

    def described(self, kind: str, ranks: Ranks, count: int) -> dict[str, Any]:
        """Return the report's entry on the choice of a finished call: the ranks at work, and the best of the others."""
        entry: dict[str, Any] = {"ranks": count, "of": ranks.size, "alternative": None}
        others = self._measured(kind, ranks, self.candidates(ranks))
        own = others.pop(count, None)
        if own is not None and others:
            best = min(others, key=lambda other: others[other])
            entry["seconds"], seconds = own[0], others[best][0]
            entry["alternative"] = {"ranks": best, "seconds": seconds, "times": seconds / own[0]}
        return entry

    def _measured(self, kind: str, ranks: Ranks, counts: list[int]) -> dict[int, tuple[float, int]]:
        """Return (seconds, number of measurements) for numbers of ranks. A single time from before the ranks started does not
        count: it may have been slow by chance."""
        found = {}
        for count in counts:
            who = self.who(ranks, count)
            samples, ran = self._times.of(kind, who), self._ran.get((kind, who), 0)
            if len(samples) > 1 or (samples and ran):
                found[count] = least(samples), max(len(samples), ran)
        return found
