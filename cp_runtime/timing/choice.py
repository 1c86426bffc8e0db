"""The number of ranks for a call: one, those of this computer, or all. Never slower than one device once that is measured.

Without measurements the prediction decides. Afterwards the least measured time does, and counts with about the same predicted time
are tried. A single measurement is repeated once before it is judged, as a first run warms up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.cost import CallWork
from .prediction import Ranks, Run, link_of, on_one_rank, predict
from .times import Times, digest, least, remember

NEARLY = 1.25  # times the best: predictions below this are tried
HOPELESS = 2.0  # times the best: a first run slower than this is not repeated
KINDS = 64  # kinds of calls to remember

Can = Callable[[int], bool]
"""Whether so many ranks have the memory for a call."""


@dataclass
class Seen:
    """Measurements of a kind of calls since the ranks started."""

    work: CallWork
    runs: dict[int, Run] = field(default_factory=dict)  # the last ones, by number of ranks
    predicted: dict[int, float] = field(default_factory=dict)  # seconds, since the last new measurement
    compared: bool = False  # a call was repeated on one rank, which counts without a second time


class Chooser:
    """The choice of ranks for the calls of one pool.

    Args:
        machine: devices, driver, backend and shares, on which times depend.
        one_device: the same of one device.
        own: number of ranks on this computer; they are the first ones.
    """

    def __init__(self, times: Times, machine: object, one_device: str, own: int) -> None:
        self._times, self._machine, self._one_device, self._own = times, machine, one_device, own
        self._seen: dict[object, Seen] = {}
        self._names: dict[object, str] = {}
        self._link = 1.0  # measured over predicted time of communication

    def who(self, ranks: Ranks, count: int) -> str:
        """Return the name of so many ranks in the table of times."""
        how = () if count == 1 else (ranks.settings, ranks.batch_degree)
        key = count, ranks.sharded, how
        if key not in self._names:
            self._names[key] = digest(*key, ranks.size, self._one_device if count == 1 else self._machine)
        return self._names[key]

    def seen(self, kind: str, ranks: Ranks) -> Seen | None:
        return self._seen.get((kind, ranks.settings, ranks.sharded))

    def candidates(self, ranks: Ranks) -> list[int]:
        """Return the numbers of ranks to choose from. With sharded weights all take part, if only to compute the same."""
        most = ranks.most or ranks.size
        return sorted({1, most} if ranks.sharded else {1, min(self._own, most), most})

    def choose(self, kind: str, ranks: Ranks, can: Can, guess: CallWork | None) -> int:
        """Return the number of ranks for the next call. `guess`: its estimated work, before the first one."""
        most = ranks.most or ranks.size
        able = [count for count in self.candidates(ranks) if count == most or can(count)]
        seen, measured = self.seen(kind, ranks), self._measured(kind, ranks, able)
        if not measured:
            predicted = self._by_guess(ranks, able, guess) if guess is not None else {}
            shortest = min(predicted.values(), default=0.0)
            # All ranks tell most: a run on one device does not show the communication between ranks.
            return next((n for n in sorted(predicted, reverse=True) if predicted[n] < NEARLY * shortest), most)
        best = min(measured, key=lambda count: measured[count][0])
        shortest, samples = measured[best]
        warm = shortest if samples > 1 or seen is None else min(shortest, seen.runs[best].seconds)
        untried = self._predicted(seen, ranks, [count for count in able if count not in measured])
        first = min(untried, key=lambda count: untried[count], default=None)
        if first is not None and untried[first] < warm / HOPELESS:
            return first
        for count, (seconds, samples) in measured.items():
            if samples == 1 and seconds < HOPELESS * shortest:
                return count
        return best if first is None or untried[first] >= NEARLY * shortest else first

    def note(self, kind: str, ranks: Ranks, count: int, work: CallWork, run: Run, tokens: int, guess: CallWork | None) -> None:
        """Record a run. `tokens`: of the whole call."""
        seen = self.seen(kind, ranks)
        if not work.attentions and work.sequence:  # one rank does not show the exchange between ranks
            known = seen.work if seen is not None else guess
            shapes = known.attentions if known is not None else ()
            work = replace(work, attentions=tuple((replace(one, queries=tokens, keys=tokens), n) for one, n in shapes))
        seen = seen or Seen(work)
        remember(self._seen, (kind, ranks.settings, ranks.sharded), seen, KINDS)
        first = count not in seen.runs
        seen.work, seen.runs[count] = work, run.warm if first else run
        if len(self._times.of(kind, self.who(ranks, count))) <= 2 or first:
            seen.predicted.clear()
            link = link_of(work, ranks, ranks.way(work, count), seen.runs[count]) or self._link
            self._link = max(link, self._link) if first else link

    def compared(self, kind: str, ranks: Ranks) -> None:
        """Record that a call of a measured kind was repeated on one rank."""
        if (seen := self.seen(kind, ranks)) is not None:
            seen.compared = True

    def described(self, kind: str, ranks: Ranks, count: int) -> dict[str, Any]:
        """Return the report's entry on the choice of a finished call: the ranks at work, and the best of the others."""
        told: dict[str, Any] = {"ranks": count, "of": ranks.size, "alternative": None}
        others = [other for other in self.candidates(ranks) if other != count]
        seen, measured = self.seen(kind, ranks), self._measured(kind, ranks, self.candidates(ranks))
        seconds = {other: measured[other][0] for other in others if other in measured}
        seconds |= self._predicted(seen, ranks, [other for other in others if other not in measured])
        if seconds and count in measured:
            told["seconds"], best = measured[count][0], min(seconds, key=lambda other: seconds[other])
            times = seconds[best] / measured[count][0]
            told["alternative"] = {"ranks": best, "seconds": seconds[best], "measured": best in measured, "times": times}
        return told

    def _measured(self, kind: str, ranks: Ranks, counts: list[int]) -> dict[int, tuple[float, int]]:
        """Return (seconds, number of measurements) for numbers of ranks. A single time from before the ranks started does not
        count: it may have been slow by chance."""
        seen, found = self.seen(kind, ranks), {}
        for count in counts:
            samples = self._times.of(kind, self.who(ranks, count))
            compared = count == 1 and seen is not None and seen.compared
            if len(samples) > 1 or (samples and seen is not None and (compared or count in seen.runs)):
                found[count] = least(samples), len(samples) + compared
        return found

    def _predicted(self, seen: Seen | None, ranks: Ranks, counts: list[int]) -> dict[int, float]:
        """Return the predicted seconds of numbers of ranks; none before a first run, or while their communication is unknown."""
        if seen is None or not (seen.work.attentions or not seen.work.sequence):
            return {}
        work, ranks = seen.work, replace(ranks, link=self._link)
        reference = max(seen.runs, key=lambda count: (seen.runs[count].communication > 0, -seen.runs[count].seconds))
        for count in counts:
            if count not in seen.predicted:
                ways = ranks.way(work, count), ranks.way(work, reference)
                seen.predicted[count] = predict(work, ranks, *ways, seen.runs[reference])
        return {count: seen.predicted[count] for count in counts}

    def _by_guess(self, ranks: Ranks, counts: list[int], work: CallWork) -> dict[int, float]:
        ranks = replace(ranks, link=self._link)
        one, run = ranks.way(work, 1), on_one_rank(work, ranks)
        return {count: predict(work, ranks, ranks.way(work, count), one, run) for count in counts}
