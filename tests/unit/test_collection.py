"""Every way in which a command can end, without a process: `Collection` is fed with what a pool would notice."""

from dataclasses import replace
from functools import partial

import pytest
from support.reports import failure

from cp_runtime.pool.collection import (
    CANCEL_GRACE,
    CANCEL_LIMIT,
    REPORT_GRACE,
    Collection,
    ModuleTimes,
    Outcome,
    SendCancel,
    SendLeave,
    Wait,
)
from cp_runtime.pool.messages import Cancelled, Done, Failure, Room

BEGAN = 100.0
TIMEOUT = 600.0
STEP = 0.25  # seconds between two ticks


good, bad = Done, partial(failure, "RuntimeError")


class Play:
    """A collection and a clock that goes on in steps, as while a pool polls."""

    def __init__(self, world_size=3, timeout=TIMEOUT):
        self.now = BEGAN
        self.collection = Collection(world_size=world_size, began=BEGAN, timeout=timeout)

    def tick(self, **noticed):
        return self.collection.tick(self.now, **noticed)

    def pass_time(self, seconds, **noticed):
        """Tick through that many seconds, or until the command has ended. Returns the last answer."""
        end = self.now + seconds
        step = None
        while self.now < end and not isinstance(step, Outcome):
            self.now = min(end, self.now + STEP)
            step = self.tick(**noticed)
        return step


@pytest.fixture
def play():
    return Play()


# --- reports and deaths -----------------------------------------------------------------------------------------------
def test_all_report_well(play):
    assert play.tick() == Wait(until=BEGAN + TIMEOUT)
    for rank in (2, 0):
        play.collection.reported(rank, Room(available=rank))
    assert play.pass_time(1, quiet=False) == Wait(until=BEGAN + TIMEOUT)
    assert play.collection.missing == [1]
    play.collection.reported(1, Room(available=1))
    outcome = play.tick(quiet=False)
    assert outcome == Outcome(replies={rank: Room(available=rank) for rank in range(3)})
    assert not outcome.kill


DIES = object()
OK = good()
# What ranks report, or that they die, and how much later than the beginning; then the rank that is the cause, those that are late,
# and whether the pool is killed.
ENDS = {
    "one fails and the others report": ([(1, bad(collectives=4)), (0, OK), (2, OK)], 1, (), False),
    "one fails and another hangs": ([(1, bad()), (0, OK)], 1, (2,), True),
    "the earliest failure is the cause": ([(2, bad(), 0.2), (0, bad(), 0.1), (1, bad(), 0.3)], 0, (), False),
    "all fail in step": ([(rank, bad(collectives=7)) for rank in range(3)], 0, (), False),
    "all fail apart": ([(rank, bad(collectives=7 + rank // 2)) for rank in range(3)], 0, (), True),
    "one left a collective under way": ([(rank, bad(collectives=7, pending=rank % 2)) for rank in range(3)], 0, (), True),
    "one has no device any more": ([(rank, bad(collectives=7, device_lost=rank == 1)) for rank in range(3)], 0, (), True),
    "one that works dies": ([(1, DIES), (0, OK), (2, OK)], 1, (1,), True),
    "one dies after a good report, which is no help, and another hangs": ([(0, OK), (0, DIES), (1, OK)], 0, (2,), True),
    "one dies after a good report, and the others work": ([(0, OK), (0, DIES), (1, OK), (2, OK)], 0, (), True),
    # The pool is killed, so its memory with the result is gone: that is no success.
    "one dies with the last report": ([(0, OK), (1, OK), (2, OK), (2, DIES)], 2, (), True),
    "all die": ([(rank, DIES, rank) for rank in range(3)], 0, (0, 1, 2), True),
    # As every rank does that cannot start.
    "one reports an error and ends": ([(1, bad()), (1, DIES), (0, OK), (2, OK)], 1, (), True),
    "a death causes errors that are noticed before it": ([(0, bad()), (1, DIES, 0.1), (2, bad(), 0.05)], 1, (1,), True),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_command(play, case):
    events, cause, late, kill = ENDS[case]
    failed, silent = False, {0, 1, 2}
    for rank, what, *after in events:
        at = BEGAN + sum(after)
        if what is DIES:
            play.collection.died(rank, at)
        else:
            play.collection.reported(rank, replace(what, at=at) if isinstance(what, Failure) else what)
        failed, silent = failed or what is not OK, silent - {rank}
        if silent:
            assert play.tick() == Wait(until=BEGAN + (REPORT_GRACE if failed else TIMEOUT))
    outcome = play.pass_time(TIMEOUT)
    assert play.now <= BEGAN + REPORT_GRACE
    assert (outcome.cause, outcome.late, outcome.kill) == (cause, late, kill)
    assert outcome.replies.keys() == {rank for rank, what, *_ in events if what is not DIES}


def test_a_second_failure_gives_no_more_time(play):
    play.collection.reported(1, bad(at=play.now))
    until = play.tick().until
    play.pass_time(STEP)
    play.collection.reported(0, bad(at=play.now))
    assert play.tick().until == until


# --- the deadline -----------------------------------------------------------------------------------------------------
def test_the_late_rank_is_named(play):
    for rank in (0, 2):
        play.collection.reported(rank, good())
    outcome = play.pass_time(TIMEOUT + 1)
    assert play.now == BEGAN + TIMEOUT
    assert (outcome.cause, outcome.late, outcome.kill) == (None, (1,), True)


def test_a_deadline_in_the_past():
    outcome = Play(timeout=-1.0).tick()
    assert (outcome.late, outcome.kill) == ((0, 1, 2), True)


def test_what_arrived_counts_after_the_deadline(play):
    play.now = BEGAN + 10 * TIMEOUT
    assert isinstance(play.tick(quiet=False), Wait)
    for rank in range(3):
        play.collection.reported(rank, good())
    assert not play.tick(quiet=False).kill


# --- cancel and abort -------------------------------------------------------------------------------------------------
def test_cancel_in_time(play):
    play.tick()
    asked = play.now
    assert play.collection.cancel(asked) == SendCancel(until=asked + CANCEL_GRACE)
    assert play.pass_time(STEP) == play.collection.cancel(play.now) == Wait(until=asked + CANCEL_GRACE)  # sent once
    for rank in range(3):
        play.collection.reported(rank, Cancelled())
    outcome = play.tick()
    assert (outcome.cancelled, outcome.cause, outcome.kill) == (True, None, False)


def test_ranks_are_told_to_leave_after_the_farthest_once_all_have_answered(play):
    play.collection.cancel(play.now)
    for rank, place in ((0, 3), (2, 5)):
        play.collection.arrived(rank, place)
        assert not isinstance(play.tick(), SendLeave)
    play.collection.arrived(1, 4)
    assert play.tick() == SendLeave(until=BEGAN + CANCEL_GRACE, place=6)
    assert not isinstance(play.tick(), SendLeave)  # once


def test_a_rank_that_has_reported_is_past_all_places(play):
    """On the batch axis, where its group had another part. The others leave their own."""
    play.collection.reported(2, good())
    play.collection.cancel(play.now)
    for rank, place in ((0, 3), (1, 2), (2, 57)):
        play.collection.arrived(rank, place)
    assert play.tick() == SendLeave(until=BEGAN + CANCEL_GRACE, place=4)


def test_nobody_is_told_to_leave_what_fails(play):
    play.collection.cancel(play.now)
    play.collection.died(0, play.now)
    for rank in (1, 2):
        play.collection.arrived(rank, 1)
    assert not isinstance(play.pass_time(CANCEL_GRACE), SendLeave)


def test_cancel_not_in_time(play):
    play.collection.cancel(play.now)
    play.collection.reported(0, Cancelled())
    outcome = play.pass_time(TIMEOUT)
    assert CANCEL_GRACE <= play.now - BEGAN < CANCEL_GRACE + STEP
    assert (outcome.cancelled, outcome.cause, outcome.late, outcome.kill) == (True, None, (1, 2), True)


def test_cancel_waits_for_three_slow_modules(play):
    assert play.collection.cancel(play.now, 2.0) == SendCancel(until=play.now + 6.0)


@pytest.mark.parametrize(("module_seconds", "grace"), [(0.1, CANCEL_GRACE), (1000.0, CANCEL_LIMIT)])
def test_cancel_waits_no_shorter_and_no_longer_than_that(play, module_seconds, grace):
    assert play.collection.cancel(play.now, module_seconds) == SendCancel(until=play.now + grace)


def test_cancel_of_what_has_failed(play):
    play.collection.reported(0, bad(at=play.now))
    assert play.tick() == play.collection.cancel(play.now) == Wait(until=play.now + REPORT_GRACE)
    assert not play.pass_time(TIMEOUT).cancelled


def test_failure_after_cancel(play):
    play.collection.cancel(play.now)
    play.collection.died(0, play.now)
    assert play.tick().until == play.now + REPORT_GRACE
    assert play.pass_time(TIMEOUT).cause == 0


def test_abort(play):
    play.collection.reported(0, good())
    play.collection.abort()
    outcome = play.tick()
    assert (outcome.aborted, outcome.kill) == (True, True)


def test_abort_of_what_is_done(play):
    """The ranks are dead already: whoever aborts kills them first."""
    for rank in range(3):
        play.collection.reported(rank, good())
    play.collection.abort()
    assert play.tick().aborted


def test_the_time_in_which_a_rank_compiles_does_not_count():
    collection = Collection(world_size=1, began=BEGAN, timeout=10.0, compile_timeout=100.0)
    now = BEGAN
    for _ in range(60):  # seconds of compiling
        now += 1.0
        assert collection.tick(now, compiling=True) == Wait(until=now + 10.0)
    assert isinstance(collection.tick(now + 1.0), Wait)
    for _ in range(10):
        now += 1.0
        step = collection.tick(now)
    assert isinstance(step, Outcome)
    assert step.late == (0,)


def test_a_call_for_which_ranks_load_may_take_longer(play):
    """As long as it is allowed from its beginning, and not once more whenever that is said."""
    for _ in range(3):
        play.collection.allow(TIMEOUT + 100)
        assert play.tick() == Wait(until=BEGAN + TIMEOUT + 100)
    play.collection.allow(1.0)
    assert play.tick() == Wait(until=BEGAN + TIMEOUT + 100)
    until = play.collection.cancel(play.now).until
    play.collection.allow(TIMEOUT + 200)
    assert play.tick() == Wait(until=until)


def test_compiling_for_ever_does_count():
    collection = Collection(world_size=1, began=BEGAN, timeout=2.0, compile_timeout=5.0)
    steps = [collection.tick(BEGAN + second, compiling=True) for second in range(1, 8)]
    assert [isinstance(step, Outcome) for step in steps] == [False] * 6 + [True]


def test_a_rank_that_compiles_gets_no_longer_to_leave():
    collection = Collection(world_size=1, began=BEGAN, timeout=100.0, compile_timeout=100.0)
    assert collection.cancel(BEGAN) == SendCancel(until=BEGAN + CANCEL_GRACE)
    steps = [collection.tick(BEGAN + second, compiling=True) for second in (1.0, 1.5)]
    assert isinstance(steps[0], Wait)
    assert isinstance(steps[1], Outcome)
    assert steps[1].cancelled
    assert steps[1].kill


# --- how long modules take --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("looks", "longest"),
    [
        ([(0, [0, 0]), (0.5, [1, 1]), (1, [1, 2]), (1.5, [2, 2]), (2, [3, 3])], 1.0),
        ([*((t, [0]) for t in range(60)), (60, [5])], 0),
        ([(0, [1]), (0.5, [2]), *((t, [2]) for t in range(1, 60))], 0.5),
    ],
    ids=["between two", "not before the first, as of weights that move", "not where it does not end"],
)
def test_the_longest_time_of_a_module_counts(looks, longest):
    times = ModuleTimes()
    for now, counts in looks:
        times.note(dict(enumerate(counts)), 100 + now)
    assert times.longest == longest
