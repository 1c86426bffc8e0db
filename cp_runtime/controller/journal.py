"""What the status and the report of CP Sampler are made of: the last error, the calls of the last sampling run, and times on one
device to compare them with, which outlive this process.

It does not grow with the number of calls: it keeps sums, and the last call.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.measuring import device_driver
from ..errors import ContextParallelError
from ..pool.kept import KeptFile, KeptSeconds
from ..pool.messages import CallReport
from .run_timer import RunTimer
from .speed import Speed

PARTS = ("compute", "communication", "wait")
# Folders of a path, up to its last slash. Their names may hold spaces.
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^\s/]+(?: [^\s/]+)*/)+")


class Node(NamedTuple):
    """A node of a prompt that is executed.

    Args:
        kind: its class, as workflows name it; None = nobody knows.
    """

    prompt_id: str
    node_id: str
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One denoise call.

    Args:
        seconds: from call to result, as the sampler sees it.
        reports: what each rank reported.
        pids: of the ranks.
        node: that it ran for.
        choice: of the ranks that took part, as `choosing.Chooser.note` describes it; None where there was none.
    """

    seconds: float
    reports: list[CallReport]
    pids: list[int]
    node: Node | None
    choice: dict[str, Any] | None = None

    @property
    def at_work(self) -> int:
        """Ranks that shared the call, which is not one of a VAE."""
        return self.reports[0].outcome.at_work

    @property
    def waiting_share(self) -> float:
        """Which part of the call rank 0 waited for other ranks and for the link."""
        return self.reports[0].communication.seconds / self.reports[0].seconds


@dataclass(frozen=True)
class Failure:
    """An error of a run.

    Args:
        time: when it happened, in seconds since the epoch.
        message: for everyone.
        rank: that caused it, if one did.
        device: of that rank.
        node: that failed with it; None = no node waited.
    """

    time: float
    message: str
    rank: int | None
    device: str | None
    node: Node | None

    @classmethod
    def of(cls, error: BaseException, devices: Sequence[str], node: Node | None) -> Failure:
        """Of an error.

        Args:
            devices: of the ranks.
        """
        rank = getattr(error, "rank", None)
        device = devices[rank] if rank is not None and rank < len(devices) else None
        return cls(time.time(), public_message(error), rank, device, node)


def public_message(error: BaseException) -> str:
    """The message of an error as anyone who reaches ComfyUI's port may see it: no traceback, no output of ranks, no folders."""
    text = str(error) if isinstance(error, ContextParallelError) else f"{type(error).__name__}: {error}"
    return _FOLDERS.sub("", text.partition("\n\n")[0])


class CallSums:
    """Sums over the calls of a sampling run. The first one, which may load or warm something up, counts only while it is alone.

    Attributes:
        count: calls that are in the sums.
        last: the last call.
        rank_0: what rank 0 reported: its seconds, and seconds and bytes of communication, measured and predicted.
        times: what `time_by_rank` returns.
    """

    def __init__(self) -> None:
        self.last: CallRecord | None = None
        self.count = 0
        self.rank_0: dict[str, float] = {}
        self.times: list[dict[str, float]] = []
        self._first = True

    def add(self, record: CallRecord) -> None:
        """Count a call that has ended."""
        ranks = len(record.reports)
        new = ranks != len(self.times)
        if new or self._first:
            self._clear(ranks)
        self._first = new
        self.last, self.count = record, self.count + 1
        report = record.reports[0]
        self.rank_0["seconds"] += report.seconds
        self.rank_0["communication_seconds"] += report.communication.seconds
        self.rank_0["communication_bytes"] += report.communication.bytes
        self.rank_0["predicted_seconds"] += report.outcome.predicted_seconds
        self.rank_0["predicted_bytes"] += report.outcome.predicted_bytes
        for total, parts in zip(self.times, time_by_rank(record.reports), strict=True):
            for part, seconds in parts.items():
                total[part] += seconds

    @property
    def waiting_share(self) -> float:
        """Which part of the calls rank 0 waited for other ranks and for the link."""
        return self.rank_0["communication_seconds"] / self.rank_0["seconds"]

    def _clear(self, ranks: int) -> None:
        names = ("seconds", "communication_seconds", "communication_bytes", "predicted_seconds", "predicted_bytes")
        self.count, self.rank_0 = 0, dict.fromkeys(names, 0.0)
        self.times = [dict.fromkeys(PARTS, 0.0) for _ in range(ranks)]


def time_by_rank(reports: Sequence[CallReport]) -> list[dict[str, float]]:
    """Where the time of a call went: seconds of compute, communication and wait of every rank; their sum is the same for all.

    A rank in a collective cannot tell a slow link from a late peer. The rank that waits least is the one that all others wait for:
    its time in collectives is counted as communication for every rank, and what others spend there beyond it as waiting, together
    with the time from the end of a rank's own work to that of the last one. A rank that does not take part waits all the time.
    """
    inside = [report.communication.seconds for report in reports]
    communication = min(seconds for report, seconds in zip(reports, inside, strict=True) if not report.outcome.idle)
    total = max(report.seconds for report in reports)
    return [
        {"compute": 0.0, "communication": 0.0, "wait": total}
        if report.outcome.idle
        else {
            "compute": report.seconds - seconds,
            "communication": communication,
            "wait": (seconds - communication) + (total - report.seconds),
        }
        for report, seconds in zip(reports, inside, strict=True)
    ]


class Journal:
    """What this process remembers of its sampling runs.

    Args:
        file: of times on one device; None = in the user's cache folder.

    Attributes:
        run: the sampling run that goes on, or went on last, on one device or on the workers.
        calls: of the workers in that run.
        last_error: of a run.
        measuring: the next run of two calls or more repeats one on one device.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.run = RunTimer(None)
        self.calls = CallSums()
        self.last_error: Failure | None = None
        self.measuring = False
        self._obstacle: tuple[str | None, str] = None, ""  # a kind of run, and why it could not be measured on one device
        self._file = KeptFile("one_device.json", file)
        self._one_device: dict[str, KeptSeconds] = {}  # by device and driver

    def begin_run(self, timer: RunTimer) -> None:
        """Start over, for a new sampling run."""
        self.run, self.calls = timer, CallSums()

    def end_run(self) -> None:
        """The run has come to its end. One on one device is what others can be compared with."""
        self.run.finish()
        seconds = self.run.per_call if self.calls.last is None else self.on_one_device
        if self.run.kind is not None and seconds:
            self._times.put(self.run.kind, seconds)

    def measure(self) -> None:
        """Have the next run measure a call on one device."""
        self.measuring, self._obstacle = True, (None, "")

    def measured(self, seconds: float | None, obstacle: str = "") -> None:
        """A call ran on one device, by choice, or was repeated there.

        The time is kept on disk when the run ends: all its calls may be such.

        Args:
            seconds: that it took there; None = it could not be done.
            obstacle: why not.
        """
        self.measuring, self._obstacle = False, (self.run.kind, obstacle)
        if self.run.kind is not None and seconds is not None:
            self._times.know(self.run.kind, seconds + self.run.between)

    @property
    def on_one_device(self) -> float | None:
        """Seconds per call of a run like this one on one device; None where none was measured."""
        return None if self.run.kind is None else self._times.get(self.run.kind)

    @property
    def speed(self) -> Speed | None:
        """Of the run; None before the end of its first call."""
        run, last = self.run, self.calls.last
        if not run.done and last is None:
            return None
        kind, obstacle = self._obstacle
        return Speed(
            ranks=1 if last is None else last.at_work,
            per_call=run.per_call,
            on_one_device=self.on_one_device,
            obstacle=obstacle if kind == run.kind else "",
        )

    @property
    def _times(self) -> KeptSeconds:
        """On a device like that of the run."""
        machine = f"{self.run.device}, {device_driver()}"
        if machine not in self._one_device:
            self._one_device[machine] = KeptSeconds(self._file, machine)
        return self._one_device[machine]
