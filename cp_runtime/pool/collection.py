"""Collecting the ranks' reports on one command, as a state machine without pipes, processes or a clock of its own.

`WorkerPool` tells it what it noticed; `Collection.tick` says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .messages import Failure, Report

CANCEL_GRACE = 1.15  # seconds that ranks get to leave a cancelled call before they are killed, or
CANCEL_MODULES = 3  # as long as this many planned modules take: a rank is inside one, stops at the next, and leaves at another
CANCEL_LIMIT = 60.0  # seconds that they get at most
REPORT_GRACE = 1.0  # seconds that the other ranks get to report after a first failure
DEATH_LAG = 0.25  # seconds by which a death may be noticed later than the errors that it causes on other ranks


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Go on polling until this time at the latest."""

    until: float


@dataclass(frozen=True, kw_only=True)
class SendCancel(Wait):
    """Ask the ranks how far they are in the call, then go on polling."""


@dataclass(frozen=True, kw_only=True)
class SendLeave(Wait):
    """Tell the ranks to leave the call at this place, then go on polling: see `cancel.CancelPoints`."""

    place: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    replies: dict[int, Report]  # by rank
    cause: int | None = None  # rank that failed first, by its report or its death
    died: frozenset[int] = frozenset()
    late: tuple[int, ...] = ()  # had not reported when the time was up. With `cause` or `cancelled`, those are the reason
    cancelled: bool = False  # the ranks were told to leave the call
    aborted: bool = False  # another thread ended the command
    kill: bool = False  # the ranks are not in step with each other any more, or not all there


@dataclass(kw_only=True)
class Collection:
    """Reports on one command. Times are on one clock, whichever."""

    world_size: int  # number of ranks, each of which reports once
    began: float  # when the command was sent
    timeout: float  # seconds until it is too late
    compile_timeout: float = 0.0  # further seconds, for ranks that compile parts of a model
    replies: dict[int, Report] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._deadline = self.began + self.timeout
        self._last_tick = self.began
        self._compile_left = self.compile_timeout
        self._failing = self._cancelled = self._aborted = False
        self._died: dict[int, float] = {}
        self._last_passed: dict[int, int] = {}  # place by rank
        self._leave_sent = False

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.replies]

    def reported(self, rank: int, reply: Report) -> None:
        self.replies[rank] = reply

    def arrived(self, rank: int, place: int) -> None:
        """Note the last place that a rank passes."""
        self._last_passed[rank] = place

    def died(self, rank: int, now: float) -> None:
        """Note that a rank has ended. The pool is incomplete then, whatever the rank has reported: that is a failure."""
        self._died[rank] = now

    def allow(self, seconds: float) -> None:
        """Note that the command may take this long from its beginning, if that is longer: ranks load a model for it, and run it for
        the first time since. Not once it fails or is cancelled."""
        if not (self._cancelled or self._failing):
            self._deadline += max(0.0, seconds - self.timeout)
            self.timeout = max(self.timeout, seconds)

    def abort(self) -> None:
        """Note that another thread wants the command to end."""
        self._aborted = True

    def cancel(self, now: float, module_seconds: float = 0.0) -> Wait:
        """Note that the user wants to cancel. Only the first time counts, and only before anything fails. `module_seconds`: the
        most that a planned module of this call takes; 0 = not known."""
        if self._cancelled or self._failing:
            return Wait(until=self._deadline)
        self._cancelled = True
        self._deadline = now + min(CANCEL_LIMIT, max(CANCEL_GRACE, CANCEL_MODULES * module_seconds))
        return SendCancel(until=self._deadline)

    def tick(self, now: float, *, quiet: bool = True, compiling: bool = False) -> Wait | Outcome:
        """Return what to do next, given the time and what has been noted until then.

        Args:
            quiet: nothing arrived. Reports that arrived while this process stood still count after the deadline, too.
            compiling: a rank compiles a part of a model: the time since the last tick does not count.
        """
        gap, self._last_tick = now - self._last_tick, now
        if compiling and not (self._cancelled or self._failing):
            spent = min(gap, self._compile_left)
            self._compile_left -= spent
            self._deadline += spent
        if self._aborted:
            return self._finish(aborted=True)
        if self._cause() is not None and not self._failing:
            self._failing = True
            self._deadline = now + REPORT_GRACE
        # Before the deadline: what is complete by then counts, however late this process looks at it.
        if all(rank in self.replies or rank in self._died for rank in range(self.world_size)):
            return self._finish()
        if quiet and now >= self._deadline:
            return self._finish()
        # Ranks that have reported are past all places: a part of the batch that another group of ranks still computes.
        if self._cancelled and not self._leave_sent and all(rank in self._last_passed for rank in self.missing):
            self._leave_sent = True
            return SendLeave(until=self._deadline, place=max(self._last_passed[rank] for rank in self.missing) + 1)
        return Wait(until=self._deadline)

    def _finish(self, *, aborted: bool = False) -> Outcome:
        # Ranks that failed at the same collective are still in step with each other, unless they left one under way.
        failures = [reply for reply in self.replies.values() if isinstance(reply, Failure)]
        counts = {failure.collectives for failure in failures}
        unusable = any(failure.pending or failure.device_lost for failure in failures)
        return Outcome(
            replies=dict(self.replies),
            cause=self._cause(),
            died=frozenset(self._died),
            late=tuple(self.missing),
            cancelled=self._cancelled,
            aborted=aborted,
            kill=aborted or unusable or bool(self._died or self.missing) or len(counts) > 1,
        )

    def _cause(self) -> int | None:
        """Return the rank with the earliest failure. If it reported an error and then died, the error is its failure."""
        failures = {rank: at - DEATH_LAG for rank, at in self._died.items()}
        failures |= {rank: reply.at for rank, reply in self.replies.items() if isinstance(reply, Failure)}
        return min(failures, key=lambda rank: (failures[rank], rank), default=None)


class ModuleTimes:
    """The longest time between two modules of a command. The one that a rank is in does not count: it may hang there.

    On an accelerator a rank may enter many at once and wait for the last of them: that wait is how long it may take to leave.
    """

    def __init__(self) -> None:
        self.longest = 0.0  # seconds
        self._entered: dict[int, tuple[int, float]] = {}  # rank -> (modules, when it entered the last)

    def note(self, modules: Mapping[int, int], now: float) -> None:
        """Take the counts of modules by rank, many times a second."""
        for rank, count in modules.items():
            before, at = self._entered.get(rank, (0, now))
            if count > before:
                self.longest = max(self.longest, now - at)
                self._entered[rank] = count, now
