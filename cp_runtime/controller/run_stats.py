"""A sampling run: its calls, measured alike on one device and on several, and its result, which every display reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from ..pool.messages import CallReport
from ..timing.times import kind_of
from ..words import ENGLISH, words_in

LAYOUT_GAIN = 1.25
"""Factor by which CPU ranks may exceed a linear speed-up: they store what they receive head by head, for which torch's kernel is
1.1 to 1.5 times as fast (docs/performance.md)."""
NOT_MEASURED = "not_measured"


def unit_of(device_type: str) -> str:
    """Return the key of the name of torch's device type, of "unit"."""
    return {"cuda": "gpu", "xpu": "gpu", "cpu": "process"}.get(device_type, "device")


class Node(NamedTuple):
    """A node of a running prompt."""

    prompt_id: str
    node_id: str
    kind: str | None = None  # its class in workflows; None = unknown


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """A call on the ranks."""

    seconds: float  # from call to result, as the sampler sees it
    # reports, pids: by rank
    reports: list[CallReport]
    pids: list[int]
    node: Node | None = None  # that it ran for
    sent: int = 0  # bytes of its arguments, to every rank
    most: int = 0  # ranks with the memory for the model, see `placement.Choice`
    fetched: bool = False  # the ranks send each other their weights, also for a call that one of them computes
    limit: float = 0.0  # largest possible speed-up of its ranks; 0 = their number
    casts: bool = False  # rank 0 cast weights that its device can multiply as they are, as other ranks cannot
    # Of the ranks that took part, from `Chooser.described`; None where there was none
    choice: dict[str, Any] | None = None
    on_all_tokens: tuple[str, ...] = ()  # nodes whose patches every rank ran on all tokens
    controlnets: int = 0  # that the ranks computed
    controlnets_here: tuple[str, str] | None = None  # see `ModelCall`
    on_whole_batch: tuple[str, ...] = ()  # nodes because of whose patches every rank ran all items

    @property
    def at_work(self) -> int:
        """Ranks that shared the call, unless it is one of pictures."""
        return self.reports[0].outcome.at_work

    @property
    def busy(self) -> int:
        """Ranks that computed a part of it."""
        return sum(not report.outcome.idle for report in self.reports)

    @property
    def prelude(self) -> float:
        """Seconds before the last rank began to compute: of loading, for the most part."""
        return max(report.outcome.prelude for report in self.reports)

    @property
    def described(self) -> dict[str, Any]:
        """The call for the status."""
        first = self.reports[0]
        return {
            "degrees": first.outcome.degrees,
            "at_work": self.busy,
            "choice": words_in(ENGLISH).choice(self.choice),
            "seconds": self.seconds,
            "waiting_share": first.communication.seconds / first.seconds,  # of rank 0, for other ranks and for the link
        }


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A sampling run, so far or as a whole. Every display reads its figures, words or `parts` here."""

    ranks: int = 0  # number that shared most calls of these ranks; 1 = one device computed it; 0 = no call yet
    per_call: float | None = None  # seconds from the second call on, which neither loads nor warms up; None = there was one at most
    alone: Sequence[float] = ()  # the same on one device: all measurements
    obstacle: str = ""  # key of the reason for no measurement, of "obstacle"; empty = there is none
    unit: str = "device"  # key of the devices' name, of "unit"
    steps: int = 0  # of the sampler, after the end of the run
    calls: int = 0  # that have returned, and that no cache has skipped
    running: bool = False  # more calls may follow
    limit: float = 0.0  # largest possible speed-up; 0 = `ranks`
    patched: int = 0  # calls in patches, which are approximate
    fetched: bool = False  # see `CallRecord.fetched`; a device without ranks fetches nothing
    # Of a call from its repetition on one device, or of one in patches from the exact one (`nested.difference`); None = unmeasured
    difference: float | None = None
    last: CallRecord | None = None  # the last call that `ranks` of the ranks shared: a try on fewer is no news of the run
    # controlnets, controlnets_here: of any call, see `CallRecord`: a ControlNet may be of some only
    controlnets: int = 0
    controlnets_here: tuple[str, str] | None = None
    # mean, by_rank: per call of the ranks, of rank 0's reports and of `time_by_rank`
    mean: Mapping[str, float] = field(default_factory=dict)
    by_rank: Sequence[Mapping[str, float]] = ()

    @property
    def possible(self) -> Sequence[float]:
        """The plausible measurements on one device: the displayed speed-up is within the limit."""
        most = (self.limit or self.ranks) * (LAYOUT_GAIN if self.unit == "process" else 1)
        return [each for each in self.alone if not self.per_call or round(each / self.per_call, 1) <= round(most, 1)]

    @property
    def on_one_device(self) -> float | None:
        """Median of the seconds on one device, or this run's value if it ran there; None = unmeasured."""
        if self.ranks == 1:
            return self.per_call
        return median(self.possible) if self.possible else None

    @property
    def times(self) -> float | None:
        """Speedup over one device, at most the possible one. None on one device, within a run, and where either time is unknown."""
        if self.ranks == 1 or self.running or not self.per_call or self.on_one_device is None:
            return None
        return min(self.on_one_device / self.per_call, self.limit or self.ranks)

    @property
    def case(self) -> str:
        """Key of its text, of "speed"."""
        if self.running and (self.last if self.ranks == 1 else self.alone):  # one rank may only be tried
            return "running"
        if self.ranks == 1:
            return "one_device"
        if self.times is not None:
            return "about" if self.unit == "process" else "compared"  # other programs use the cores as well
        if self.alone:
            return "too_few" if self.possible else "disturbed"
        return "obstacle" if self.obstacle else NOT_MEASURED

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of the words, for `Words.speed` and the browser: `cases`, keys of texts from the innermost on, each the {speed} of
        the next, and their numbers as text. The numbers agree: the quotient of the seconds shown is the speedup shown."""
        times, cases = self.times, [self.case]
        parts: dict[str, Any] = {"cases": cases, "ranks": self.ranks, "unit": self.unit, "obstacle": self.obstacle}
        if times is not None and self.per_call:
            ends = [min(seconds / self.per_call, self.limit or self.ranks) for seconds in self.possible]
            low, high = f"{min(ends):.1f}", f"{max(ends):.1f}"
            parts |= {"times": f"{times:.1f}", "low": low, "high": high, "count": len(self.possible)}
            if low != high:
                cases.append("spread")
            if self.fetched:
                cases.append("fetched")
        if self.steps and self.per_call:
            seconds = self.per_call * self.calls
            parts |= {"steps": self.steps, "seconds": f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"}
            if times is not None:
                parts |= _seconds(seconds, times)
            cases.append("ended" if times is None or f"{times:.1f}" == "1.0" else "instead")
        if self.patched:
            parts |= {"patched": self.patched, "calls": self.calls}
            cases.append("approximate")
        return parts

    @property
    def words(self) -> str:
        """The speed in English."""
        return words_in(ENGLISH).speed(self.parts)

    @property
    def waiting_share(self) -> float:
        """Fraction of the calls that rank 0 spent waiting for other ranks and for the link."""
        return self.mean["communication_seconds"] / self.mean["seconds"]

    @property
    def described(self) -> dict[str, Any]:
        """The speed for the status. Seconds of both kinds include the sampler's time between two calls: they are comparable."""
        return {
            "times": self.times,
            "seconds_per_call": self.per_call,
            "seconds_per_call_on_one_device": self.on_one_device,
            "difference_from_one_device": self.difference,
            "words": self.words,
            "parts": self.parts,  # for texts in other languages
        }


def _seconds(seconds: float, times: float) -> dict[str, str]:
    """Return the seconds of a run and those on one device, with as many digits as their quotient needs to be the speedup."""
    # Rounded apart, both could give another quotient than the speed-up beside them.
    for digits in range(7):
        own, alone = f"{seconds:.{digits}f}", f"{seconds * times:.{digits}f}"
        if float(own) and f"{float(alone) / float(own):.1f}" == f"{times:.1f}":
            return {"seconds": own, "alone": alone}
    return {"seconds": f"{seconds:.3g}", "alone": f"{seconds * times:.3g}"}


class RunStats:
    """The calls of one sampling run.

    Args:
        key: that models have in common which were loaded alike; None = of none.
        machine: of a run on one device: device and driver, in words.
        unit: key of such a device's name, of "unit".

    Attributes:
        result: of the calls that have ended.
        now: kind of the current call; None between two calls, or without a key.
        kind: of all its calls; None where they differ, or without a key. Runs of one kind take the same time.
        one_rank: name of one of the ranks in the table of times, where they computed a call.
        pinned: number of ranks for all its calls, as its first one has chosen; 0 = every call chooses.
        begun: number of calls, with the current one.
        skipped: calls that a step cache has answered, although others reached the ranks.
        count: calls on the ranks in the means. The first call, which may include loading or warm-up, counts only while it is alone.
    """

    def __init__(self, key: str | None, machine: str = "", unit: str = "device") -> None:
        self.result = RunResult(ranks=1, unit=unit)
        self.kind: str | None = None
        self.now: str | None = None
        self.machine, self.one_rank = machine, ""
        self.pinned = self.begun = self.count = self.skipped = 0
        self._at_work: Counter[int] = Counter()  # calls, by the number of ranks that shared them
        self._reached = False  # the current call has reached the ranks
        self._key = key
        self._first = self._second = self._last = 0.0
        self._inside = 0.0  # seconds that the ranks, or their owner, spent on finished calls
        self._extra = 0.0  # of these, since the second call, seconds that belong to no call
        self._alone = True  # only the first call is in the means

    def enter(self, arguments: dict[str, Any]) -> None:
        """Record the start of a call. `arguments`: those that tell kinds of calls apart."""
        self.now, self._reached = None if self._key is None else kind_of(self._key, arguments), False
        self.note(running=True)
        self.begun += 1
        self.kind = self.now if self.begun == 1 or self.now == self.kind else None
        self._last = time.monotonic()
        if self.begun == 1:
            self._first = self._last
        elif self.begun == 2:
            self._second = self._last

    def leave(self) -> None:
        """Record the return of the call. A device may still compute it."""
        self.now = None
        self.skipped += self.result.last is not None and not self._reached
        self.finish()
        self.note(running=True)

    def finish(self, steps: int = 0) -> None:
        """Record the end of the run, after `steps` steps, or of a call."""
        seconds = time.monotonic() - self._second - self._extra
        calls = self.begun - self.skipped
        self.note(calls=calls, steps=steps, per_call=seconds / (calls - 1) if calls > 1 else None, running=False)

    def note(self, **figures: Any) -> None:
        """Record fields of the result."""
        self.result = replace(self.result, **figures)

    def inside(self, seconds: float, extra: float = 0.0) -> None:
        """Add the seconds of a call on the ranks, from call to result. `extra`: the part that belongs to no call of the run."""
        self._inside += seconds
        self._extra += extra if self.begun > 1 else 0.0

    def add(self, record: CallRecord) -> None:
        """Record a call on the ranks, after its end."""
        mean, by_rank, self._reached = self.result.mean, self.result.by_rank, True
        new = len(record.reports) != len(by_rank)
        if new or self._alone:
            self.count, mean, by_rank = 0, {}, [{} for _ in record.reports]
        if new:  # other ranks
            self._at_work.clear()
        self._alone = new
        self.count += 1
        self._at_work[record.at_work] += 1
        ranks = max(self._at_work, key=self._at_work.__getitem__)
        if record.at_work == ranks:
            self.note(ranks=ranks, last=record, limit=record.limit)
        first = record.reports[0]
        sent, outcome = first.communication, first.outcome
        figures = {
            "seconds": first.seconds,
            "communication_seconds": sent.seconds,
            "communication_bytes": sent.bytes,
            "sent_to_ranks": record.sent,
            "predicted_seconds": outcome.predicted_seconds,
            "predicted_bytes": outcome.predicted_bytes,
        }
        self.note(
            controlnets=max(self.result.controlnets, record.controlnets),
            controlnets_here=record.controlnets_here or self.result.controlnets_here,
            patched=self.result.patched + (outcome.staged is not None and outcome.staged.patches > 1),
            mean=self._mean(mean, figures),
            by_rank=[self._mean(*both) for both in zip(by_rank, time_by_rank(record.reports), strict=True)],
        )

    def _mean(self, before: Mapping[str, float], figures: Mapping[str, float]) -> dict[str, float]:
        """Return the means of `count` calls: those of the calls before, with the figures of the last one."""
        return {name: (before.get(name, 0.0) * (self.count - 1) + figure) / self.count for name, figure in figures.items()}

    @property
    def between(self) -> float:
        """Mean seconds from the end of a call on the ranks to the beginning of the next, over the calls so far."""
        return max(0.0, self._last - self._first - self._inside) / max(1, self.begun - 1)

    @property
    def taken(self) -> float:
        """Seconds since the second call began; 0 before it. For a running run, until now."""
        return time.monotonic() - self._second if self.begun > 1 else 0.0


def time_by_rank(reports: Sequence[CallReport]) -> list[dict[str, float]]:
    """Return seconds of compute, communication and wait for every rank of a call; their sum is the same for all.

    A rank in a collective cannot tell a slow link from a late peer. All others wait for the rank that waits least, so its time in
    collectives counts as communication for every rank. The rest of their time there counts as waiting, and so does the time from
    the end of a rank's work to the end of the last rank's. An idle rank only waits.
    """
    communication = min(report.communication.seconds for report in reports if not report.outcome.idle)
    total, found = max(report.seconds for report in reports), []
    for report in reports:
        compute = 0.0 if report.outcome.idle else report.seconds - report.communication.seconds
        sent = 0.0 if report.outcome.idle else communication
        found.append({"compute": compute, "communication": sent, "wait": total - compute - sent})
    return found
