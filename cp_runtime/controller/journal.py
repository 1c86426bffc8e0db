"""Records for the status and the report of CP Sampler: last error and last run; and the user's preferences in the panel."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..cache import CacheFile
from ..errors import ContextParallelError
from ..pool.protocol import decode
from ..recent import Recent
from ..timing.times import Times
from ..words import translations
from .prompt_times import PromptTimes, SampledRun
from .run_stats import CallRecord, Node, RunResult, RunStats

log = logging.getLogger("context_parallel")

ERRORS = 10  # errors in the journal
MOST_KINDS = 256  # of calls: every size of picture is one
MEASURE_SHARE = 0.05  # of the time of runs of a kind: nobody has asked for the measurement, so it must not be noticed
# Folders of a path, up to its last slash, or backslash behind a drive or a computer's name. Their names may hold spaces.
_FOLDERS = re.compile(
    r"(?<![\w/.])/(?:[^\s/]+(?: [^\s/]+)*/)+" r"|(?:\b[A-Za-z]:|(?<![\w\\])\\)[\\/](?:[^\s\\/:]+(?: [^\s\\/:]+)*[\\/])+"
)


@dataclass(frozen=True)
class Failure:
    time: float  # in seconds since the epoch
    message: str  # for everyone to see
    rank: int | None  # rank that caused it, or None
    device: str | None  # of that rank
    node: Node | None  # node that failed; None = no node waited

    @property
    def described(self) -> dict[str, Any]:
        """The error for the status."""
        node = self.node and {"id": self.node.node_id, "type": self.node.kind}
        return {**vars(self), "translations": translations(self.message), "node": node}


def public_message(error: BaseException) -> str:
    """Return the message of an error for anyone who reaches ComfyUI's port: no traceback, no output of ranks, no folders."""
    text = str(error) if isinstance(error, ContextParallelError) else f"{type(error).__name__}: {error}"
    return _FOLDERS.sub("", text.partition("\n\n")[0])


class Journal:
    """This process's record of its runs. `times`: of calls, on one device and on several.

    Attributes:
        run: the current or last sampling run, on one device or on the workers.
        node: the current or last node that uses the workers; None where there is no graph.
        last_error: of a run; None once another has ended well, or another prompt with a node of this pack has begun.
        errors: the last ones, the newest first.
        measuring: the next run of two calls or more repeats one on one device.
        is_bypassed: the last prompt that samples did so without this pack.
        prompt: where the time of the current or last prompt went.
        own_prompt: the same of the last one with a node of this pack.
        changed: set whenever the status changes. Its waiter clears it.
    """

    def __init__(self, times: Times) -> None:
        self.run, self._times = RunStats(None), times
        self.node: Node | None = None
        self.last_error: Failure | None = None
        self.errors: deque[Failure] = deque(maxlen=ERRORS)
        self.changed = threading.Event()
        self.measuring = self.is_bypassed = False
        self._obstacle: tuple[str | None, str] = None, ""  # a kind of run, and why it could not be measured on one device
        self._taken: dict[str, float] = {}  # seconds of all runs that ended well, by kind
        self._together: Recent[str, tuple[int, float]] = Recent(MOST_KINDS)  # devices of a run and seconds per call, by kind
        self.prompt = self.own_prompt = PromptTimes()

    def begin_prompt(self, prompt: PromptTimes, is_own: bool) -> None:
        """Record the start of a prompt. `is_own`: it has a node of this pack. What is said of a failure before it is over."""
        if is_own:
            if self.own_prompt.unfinished:
                self.run = RunStats(None)
            self.own_prompt, self.last_error = prompt, None
        self.prompt = prompt
        self.changed.set()

    def end_run(self, steps: int = 0) -> None:
        """Record the success of the run, of `steps` steps. Later runs are compared with one on one device."""
        run = self.run
        run.finish(steps)
        if run.kind is not None:
            self._taken[run.kind] = self._taken.get(run.kind, 0.0) + run.taken
            self._note_in_prompt(run.kind)
            if run.result.last is None and run.result.per_call:
                self._times.add(run.kind, run.machine, run.result.per_call)
        self._times.save()
        self.run_succeeded()

    def _note_in_prompt(self, kind: str) -> None:
        """Record a run of calls of one kind in the prompt, with what is known of them on another number of devices."""
        if (result := self.result) is None or not result.per_call:
            return
        other = self._together.get(kind)
        if result.ranks > 1:
            self._together[kind] = result.ranks, result.per_call
            other = None if result.on_one_device is None else (1, result.on_one_device)
        self.prompt.runs.append(SampledRun(result.calls, result.per_call, result.unit, other))

    def run_succeeded(self) -> None:
        """Record the success of a run, of a model or of a VAE: an earlier error is over."""
        self.last_error = None
        self.changed.set()

    def fail(self, error: BaseException, node: Node | None, devices: Sequence[str] = ()) -> Failure:
        """Record the failure of a run, or its refusal before it reached the workers. `devices`: of the ranks."""
        rank = getattr(error, "rank", None)
        device = devices[rank] if rank is not None and rank < len(devices) else None
        self.last_error = Failure(time.time(), public_message(error), rank, device, node)
        self.errors.appendleft(self.last_error)
        self.changed.set()
        return self.last_error

    def pass_through(self, node: Node | None) -> None:
        """Record a node that passes its model through: this machine has one device."""
        self.node = node
        self.changed.set()

    def begin_run(self, run: RunStats, node: Node | None) -> None:
        """Record the start of a sampling run, on one device or on several, and its node."""
        self.run, self.node, self.is_bypassed = run, node or self.node, False
        self.changed.set()

    def bypassed(self, before: RunStats) -> None:
        """Record the start of a prompt that samples without this pack: the previous run's figures no longer apply. A run that has
        begun since keeps its figures. `before`: the run before the prompt was checked."""
        if self.run is before:
            self.node, self.run, self.own_prompt, self.is_bypassed = None, RunStats(None), PromptTimes(), True

    def measure(self) -> None:
        """Measure a call of the next run on one device."""
        self.measuring, self._obstacle = True, (None, "")
        self.changed.set()

    def forget(self) -> None:
        """Forget the measurements on one device of runs like this one, for a requested one."""
        if self.run.kind is not None:
            for who in (self.run.machine, self.run.one_rank):
                self._times.forget(self.run.kind, who)

    def cancel_measuring(self) -> None:
        """Measure no call, in this run or the next one."""
        self.measuring = False
        self.changed.set()

    def measured(self, obstacle: str = "", difference: float | None = None) -> None:
        """Record a call on one device, by choice or as a repetition, or the obstacle to it. `obstacle`: key of its text, of
        "obstacle"; `difference`: see `RunResult`."""
        self.measuring, self._obstacle = False, (self.run.kind, obstacle)
        if difference is not None and math.isfinite(difference):  # the status is JSON, which has no other numbers
            self.run.note(difference=difference)
        elif difference is not None:
            log.warning("the result of the measured call differs by %s from that on one device", difference)

    def is_worth_measuring(self, record: CallRecord) -> bool:
        """Return whether to repeat this call on one device unrequested: the first time for this model, size and device, if that
        takes a small part of the time of such runs in this process."""
        run, result = self.run, self.result
        if result is None or result.alone or result.obstacle or run.kind is None:
            return False
        return record.seconds * record.at_work <= MEASURE_SHARE * (self._taken.get(run.kind, 0.0) + run.taken)

    @property
    def result(self) -> RunResult | None:
        """Result of the run so far, with its comparison with one device; None before the end of its first call."""
        run, result = self.run, self.run.result
        if not result.calls and result.last is None:
            return None
        kind, obstacle = self._obstacle
        there, on_one_rank = (self._times.of(run.kind, who) if run.kind else () for who in (run.machine, run.one_rank))
        return replace(
            result,
            alone=there or on_one_rank,  # a rank on CPUs has a part of the cores that the device had
            obstacle=obstacle if kind == run.kind else "",
            # A device that ran by itself, without ranks, fetched nothing.
            fetched=result.last is not None and result.last.fetched and not there,
        )


@dataclass(frozen=True)
class Preferences:
    """The user's preferences."""

    devices: str = ""  # as in the settings; empty = all
    measure: bool = True  # compare long runs with one device unrequested


class KeptPreferences:
    """The preferences, and their file. `file`: its path, from the user's cache folder."""

    def __init__(self, file: str | Path = "preferences.json") -> None:
        self._file, self.chosen = CacheFile(file), Preferences()
        with contextlib.suppress(ValueError):
            self.chosen = decode(Preferences, self._file.read())

    def choose(self, **changes: Any) -> None:
        self.chosen = replace(self.chosen, **changes)
        self._file.put(asdict(self.chosen))
