"""Records behind the status and the report of CP Sampler: the last error, the last sampling run, and times on one device to compare
it with. Those and what a user has chosen in the panel outlive this process."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import ContextParallelError
from ..pool.kept import KeptFile, KeptSamples
from ..pool.protocol import decode
from .run_stats import CallRecord, Node, RunStats, Speed

ERRORS = 10  # that are kept
SMALL = 0.05  # part of the time of runs that a measurement may take which nobody has asked for
# Folders of a path, up to its last slash. Their names may hold spaces.
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^\s/]+(?: [^\s/]+)*/)+")


@dataclass(frozen=True)
class Failure:
    """An error of a run."""

    time: float  # when it happened, in seconds since the epoch
    message: str  # for everyone to see
    rank: int | None  # that caused it, if one did
    device: str | None  # of that rank
    node: Node | None  # that failed with it; None = no node waited


def public_message(error: BaseException) -> str:
    """Return the message of an error for anyone who reaches ComfyUI's port: no traceback, no output of ranks, no folders."""
    text = str(error) if isinstance(error, ContextParallelError) else f"{type(error).__name__}: {error}"
    return _FOLDERS.sub("", text.partition("\n\n")[0])


class Journal:
    """This process's record of its runs. `file`: of times on one device, from the user's cache folder.

    Attributes:
        run: the sampling run that goes on, or went on last, on one device or on the workers.
        node: the one that uses the workers, or used them last; None where there is no graph.
        last_error: of a run; None once another has ended well.
        errors: the last ones, the newest first.
        measuring: the next run of two calls or more repeats one on one device.
        changed: set whenever the status changes. Whoever waits for it clears it.
    """

    def __init__(self, file: str | Path = "one_device.json") -> None:
        self.run = RunStats(None)
        self.node: Node | None = None
        self.last_error: Failure | None = None
        self.errors: deque[Failure] = deque(maxlen=ERRORS)
        self.changed = threading.Event()
        self.measuring = False
        self._obstacle: tuple[str | None, str] = None, ""  # a kind of run, and why it could not be measured on one device
        self._file = KeptFile(file)
        self._one_device: dict[str, KeptSamples] = {}  # by device and driver
        self._taken: dict[str, float] = {}  # seconds of all runs that ended well, by kind

    def end_run(self, steps: int = 0) -> None:
        """Note that the run has ended well, after so many steps. If it ran on one device, others can be compared with it."""
        run = self.run
        run.finish(steps)
        if run.kind is not None:
            self._taken[run.kind] = self._taken.get(run.kind, 0.0) + run.taken
        if run.last is None and run.per_call:
            run.alone = [run.per_call]
        if run.kind is not None and run.alone:
            seconds, run.alone = median(run.alone), []
            self._times.add(run.kind, seconds)
        self.did_well()

    def did_well(self) -> None:
        """Note that a run, of a model or of a VAE, has ended well: an earlier error is over."""
        self.last_error = None
        self.changed.set()

    def fail(self, error: BaseException, node: Node | None, devices: Sequence[str] = ()) -> Failure:
        """Note that a run failed, or is refused before it reaches the workers. `devices`: of the ranks."""
        rank = getattr(error, "rank", None)
        device = devices[rank] if rank is not None and rank < len(devices) else None
        self.last_error = Failure(time.time(), public_message(error), rank, device, node)
        self.errors.appendleft(self.last_error)
        self.changed.set()
        return self.last_error

    def pass_through(self, node: Node | None) -> None:
        """Note that a node passes its model through, because this machine has no devices to share it out to."""
        self.node = node
        self.changed.set()

    def bypassed(self, before: RunStats) -> None:
        """Note that a prompt has begun that samples without this pack: the figures of the run before it no longer apply. One that
        has begun since keeps its own. `before`: the run as it was before anybody looked at the prompt."""
        if self.run is before:
            self.node, self.run = None, RunStats(None)

    def measure(self) -> None:
        """Have the next run measure a call on one device."""
        self.measuring, self._obstacle = True, (None, "")
        self.changed.set()

    def cancel_measuring(self) -> None:
        """Measure no call, neither in the next run nor in this one, where one may be under way."""
        self.measuring = False
        self.changed.set()

    def measured(self, seconds: float | None, obstacle: str = "", difference: float | None = None) -> None:
        """Note that a call ran on one device, by choice, or was repeated there.

        The time is kept on disk when the run ends: all its calls may be such.

        Args:
            seconds: that it took there; None = it could not be done.
            obstacle: why not, of OBSTACLES.
            difference: of the result from that on the ranks.
        """
        if difference is not None:
            self.run.difference = difference
        self.measuring, self._obstacle = False, (self.run.kind, obstacle)
        if self.run.kind is not None and seconds is not None:
            self.run.alone.append(seconds + self.run.between)

    def is_worth_measuring(self, record: CallRecord) -> bool:
        """Return whether this call of the run may be repeated on one device although nobody has asked for it: the first time for
        this model, size and device, where that takes a small part of what runs like this one have taken in this process."""
        run, speed = self.run, self.speed
        if speed is None or speed.alone or speed.obstacle or run.kind is None:
            return False
        return record.seconds * record.at_work <= SMALL * (self._taken.get(run.kind, 0.0) + run.taken)

    @property
    def alone(self) -> tuple[float, ...]:
        """Seconds per call of runs like this one on one device, as often as they were measured; of this run, their median."""
        run = self.run
        if run.kind is None:
            return ()
        return self._times.get(run.kind, ()) + ((median(run.alone),) if run.alone else ())

    @property
    def speed(self) -> Speed | None:
        """Speed of the run; None before the end of its first call."""
        run, last = self.run, self.run.last
        if not run.done and last is None:
            return None
        kind, obstacle = self._obstacle
        return Speed(
            ranks=1 if last is None else last.at_work,
            per_call=run.per_call,
            alone=self.alone,
            obstacle=obstacle if kind == run.kind else "",
            unit=run.unit,
            steps=run.steps,
            calls=run.done,
        )

    @property
    def _times(self) -> KeptSamples:
        """Times on a device like that of the run."""
        machine = self.run.machine
        kept = self._one_device.get(machine)
        # Two threads may come here first: what one of them records must not be lost with a second object.
        return self._one_device.setdefault(machine, KeptSamples(self._file, machine)) if kept is None else kept


NAME = "panel"


@dataclass(frozen=True)
class Preferences:
    """What can be chosen."""

    devices: str = ""  # as CP Config takes them; empty = all
    measure: bool = True  # a long run is compared with one device by itself


class KeptPreferences:
    """The choices, and their file. `file`: its path, from the user's cache folder."""

    def __init__(self, file: str | Path = "preferences.json") -> None:
        self._file, self.chosen = KeptFile(file), Preferences()
        entry = {name: value for name, value in self._file.read(NAME).get(NAME, {}).items() if name != "time"}
        with contextlib.suppress(ValueError):
            self.chosen = decode(Preferences, entry)

    def choose(self, **changes: Any) -> None:
        """Change some of them."""
        self.chosen = replace(self.chosen, **changes)
        self._file.put(NAME, NAME, asdict(self.chosen))
