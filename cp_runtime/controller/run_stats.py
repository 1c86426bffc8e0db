"""Times of a sampling run's calls, measured alike on one device and on several, for every display. Running sums; constant size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ..pool.messages import CallReport
from ..timing.times import kind_of
from ..words import ENGLISH, words_in

PARTS = ("compute", "communication", "wait")
SUMS = ("seconds", "communication_seconds", "communication_bytes", "predicted_seconds", "predicted_bytes")
UNITS = ("gpu", "process", "device")
"""Kinds of devices: keys of their names in locales/*/main.json."""


def unit_of(device_type: str) -> str:
    """Return the key in UNITS of torch's device type."""
    return {"cuda": "gpu", "xpu": "gpu", "cpu": "process"}.get(device_type, "device")


BY_HEAD = 1.25
"""Factor by which processes may be faster than their number: what they exchange, they lay out as CPU kernels read it fastest."""

OBSTACLES = ("sizes", "failed", "memory", "cancelled", "staged")
"""Reasons why a run is not compared: keys of their texts."""
NOT_MEASURED = "not_measured"


class Node(NamedTuple):
    """A node of a running prompt."""

    prompt_id: str
    node_id: str
    kind: str | None = None  # its class in workflows; None = unknown


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    seconds: float  # from call to result, as the sampler sees it
    # reports, pids: by rank
    reports: list[CallReport]
    pids: list[int]
    node: Node | None = None  # that it ran for
    most: int = 0  # ranks with the memory for the model, see `placement.Choice`
    fetched: bool = False  # the ranks send each other their weights, also for a call that one of them computes
    # Of the ranks that took part, from `Chooser.described`; None where there was none
    choice: dict[str, Any] | None = None

    @property
    def at_work(self) -> int:
        """Ranks that shared the call, unless it is one of a VAE."""
        return self.reports[0].outcome.at_work

    @property
    def waiting_share(self) -> float:
        """Fraction of the call that rank 0 spent waiting for other ranks and for the link."""
        return self.reports[0].communication.seconds / self.reports[0].seconds


class RunStats:
    """The calls of one sampling run.

    Args:
        key: that models have in common which were loaded alike; None = of none.
        machine: of a run on one device: device and driver, in words.
        unit: name of such a device, of UNITS.

    Attributes:
        steps: of the sampler; 0 = the run is not over.
        now: kind of the current call; None between two calls, or without a key.
        kind: of all its calls; None where they differ, or without a key. Runs of one kind take the same time.
        one_rank: name of one of the ranks in the table of times, where they computed a call.
        calls, done: numbers of calls begun and returned.
        last: the last call on the ranks; None on one device.
        difference: of a call's result from that on one device (`nested.difference`), or of a call in patches from the exact one;
            None if unmeasured.
        patched: calls in patches, which are approximate.
        limit: speed-up that the ranks' shares allow over the first of them; 0 = as many as take part.
        count, rank_0, times: calls on the ranks, and sums of rank 0's reports and of `time_by_rank`. The first call, which may
            include loading or warm-up, is in them only while it is alone.
    """

    def __init__(self, key: str | None, machine: str = "", unit: str = "device") -> None:
        self.calls = self.done = self.count = self.patched = 0
        self.kind: str | None = None
        self.now: str | None = None
        self.machine, self.unit, self.one_rank = machine, unit, ""
        self.difference: float | None = None
        self.steps = 0
        self.limit = 0.0
        self.last: CallRecord | None = None
        self.rank_0: dict[str, float] = {}
        self.times: list[dict[str, float]] = []
        self._key = key
        self._first = self._second = self._last = self._ended = 0.0
        self._inside = 0.0  # seconds that the ranks, or their owner, spent on finished calls
        self._extra = 0.0  # of these, since the second call, seconds that belong to no call
        self._alone = True  # only the first call is in the sums

    def enter(self, arguments: dict[str, Any]) -> None:
        """Record the start of a call. `arguments`: those that tell kinds of calls apart."""
        self.now = None if self._key is None else kind_of(self._key, arguments)
        self.calls += 1
        self.kind = self.now if self.calls == 1 or self.now == self.kind else None
        self._last = time.monotonic()
        if self.calls == 1:
            self._first = self._last
        elif self.calls == 2:
            self._second = self._last

    def leave(self) -> None:
        """Record the return of the call. A device may still compute it."""
        self.done, self._ended, self.now = self.calls, time.monotonic(), None

    def finish(self, steps: int = 0) -> None:
        """Record the end of the run. `steps`: of the sampler."""
        self._ended, self.steps = time.monotonic(), steps

    def inside(self, seconds: float, extra: float = 0.0) -> None:
        """Add the seconds of a call on the ranks, from call to result. `extra`: the part that belongs to no call of the run."""
        self._inside += seconds
        self._extra += extra if self.calls > 1 else 0.0

    def add(self, record: CallRecord) -> None:
        """Add a call on the ranks to the sums, after its end."""
        new = len(record.reports) != len(self.times)
        if new or self._alone:
            self.count, self.rank_0 = 0, dict.fromkeys(SUMS, 0.0)
            self.times = [dict.fromkeys(PARTS, 0.0) for _ in record.reports]
        staged = record.reports[0].outcome.staged
        self.patched += staged is not None and staged.patches > 1
        self._alone = new
        self.last, self.count = record, self.count + 1
        report = record.reports[0]
        sent, outcome = report.communication, report.outcome
        figures = report.seconds, sent.seconds, sent.bytes, outcome.predicted_seconds, outcome.predicted_bytes
        for name, figure in zip(SUMS, figures, strict=True):
            self.rank_0[name] += figure
        for total, parts in zip(self.times, time_by_rank(record.reports), strict=True):
            for part, seconds in parts.items():
                total[part] += seconds

    @property
    def between(self) -> float:
        """Mean seconds from the end of a call on the ranks to the beginning of the next, over the calls so far."""
        return max(0.0, self._last - self._first - self._inside) / max(1, self.calls - 1)

    @property
    def per_call(self) -> float | None:
        """Seconds per call from the second one on: the first loads and warms up. None where there were too few."""
        return (self._ended - self._second - self._extra) / (self.done - 1) if self.done > 1 else None

    @property
    def taken(self) -> float:
        """Seconds since the second call began; 0 before it. For a running run, until now."""
        return time.monotonic() - self._second if self.calls > 1 else 0.0

    @property
    def waiting_share(self) -> float:
        """Fraction of the calls that rank 0 spent waiting for other ranks and for the link."""
        return self.rank_0["communication_seconds"] / self.rank_0["seconds"]


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


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speedup of several devices over one. Every display uses this calculation, and these words or their `parts`."""

    ranks: int  # number that shared a call; 1 = one device computed it
    per_call: float | None  # seconds from one call to the next; None = there were too few calls
    alone: Sequence[float] = ()  # the same on one device: all measurements
    obstacle: str = ""  # why it could not be measured, of OBSTACLES; empty = it could
    unit: str = "device"  # of UNITS
    # steps, calls: of the run, once it is over
    steps: int = 0
    calls: int = 0
    limit: float = 0.0  # largest speed-up that there can be; 0 = `ranks`
    patched: int = 0  # calls in patches, which are approximate
    fetched: bool = False  # see `CallRecord.fetched`

    @property
    def possible(self) -> Sequence[float]:
        """The measurements on one device whose speed-up there can be, as far as the figure shown tells."""
        most = (self.limit or self.ranks) * (BY_HEAD if self.unit == "process" else 1)
        return [each for each in self.alone if not self.per_call or round(each / self.per_call, 1) <= round(most, 1)]

    @property
    def on_one_device(self) -> float | None:
        """Median of the seconds on one device, or this run's value if it ran there; None = unmeasured."""
        if self.ranks == 1:
            return self.per_call
        return median(self.possible) if self.possible else None

    @property
    def times(self) -> float | None:
        """Speedup over one device. None on one device, and where either time is unknown."""
        if self.ranks == 1 or not self.per_call or self.on_one_device is None:
            return None
        return self.on_one_device / self.per_call

    @property
    def case(self) -> str:
        """Key of its text, of "speed"."""
        if self.ranks == 1:
            return "one_device"
        if self.times is not None:
            return "compared"
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
            low, high = (f"{seconds / self.per_call:.1f}" for seconds in (min(self.possible), max(self.possible)))
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
            cases.append("ended" if times is None else "instead")
        if self.patched:
            parts |= {"patched": self.patched, "calls": self.calls}
            cases.append("approximate")
        return parts

    @property
    def words(self) -> str:
        """The speed in English."""
        return words_in(ENGLISH).speed(self.parts)


def _seconds(seconds: float, times: float) -> dict[str, str]:
    """Return the seconds of a run and those on one device, with as many digits as their quotient needs to be the speedup."""
    for digits in range(7):
        own, alone = f"{seconds:.{digits}f}", f"{seconds * times:.{digits}f}"
        if float(own) and f"{float(alone) / float(own):.1f}" == f"{times:.1f}":
            return {"seconds": own, "alone": alone}
    return {"seconds": f"{seconds:.3g}", "alone": f"{seconds * times:.3g}"}
