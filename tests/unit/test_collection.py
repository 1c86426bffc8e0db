"""Every way in which a command can end, without a process: `Collection` is fed with what a pool would notice."""

from functools import partial

import pytest
from support.reports import failure

from cp_runtime.pool.collection import (
    CANCEL_GRACE,
    CANCEL_LIMIT,
    REPORT_GRACE,
    STOPPED_GRACE,
    SUSPENDED,
    Collection,
    Outcome,
    SendCancel,
    Wait,
)
from cp_runtime.pool.messages import Cancelled, Done, Failure, Room

BEGAN = 100.0
TIMEOUT = 600.0
STEP = 0.25  # seconds between two ticks, well below SUSPENDED


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


# --- reports ----------------------------------------------------------------------------------------------------------


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


def test_one_fails_and_the_others_report(play):
    play.collection.reported(1, bad(at=play.now, collectives=4))
    assert play.tick() == Wait(until=play.now + REPORT_GRACE)
    play.collection.reported(0, good())
    play.collection.reported(2, good())
    outcome = play.tick()
    assert (outcome.cause, outcome.kill, outcome.late) == (1, False, ())


def test_one_fails_and_the_others_hang(play):
    play.collection.reported(1, bad(at=play.now))
    play.collection.reported(0, good())
    failed_at = play.now
    outcome = play.pass_time(TIMEOUT)
    assert play.now == failed_at + REPORT_GRACE + STEP  # the first tick at which the failure was seen came a step later
    assert (outcome.cause, outcome.late, outcome.kill) == (1, (2,), True)


def test_a_second_failure_gives_no_more_time(play):
    play.collection.reported(1, bad(at=play.now))
    until = play.tick().until
    play.pass_time(STEP)
    play.collection.reported(0, bad(at=play.now))
    assert play.tick().until == until


def test_the_earliest_failure_is_the_cause(play):
    play.collection.reported(2, bad(at=play.now + 0.2))
    play.collection.reported(0, bad(at=play.now + 0.1))
    play.collection.reported(1, bad(at=play.now + 0.3))
    assert play.tick().cause == 0


@pytest.mark.parametrize(
    ("positions", "kill"),
    [
        ([{"collectives": 7}] * 3, False),
        ([{"collectives": 7}, {"collectives": 7}, {"collectives": 8}], True),
        ([{"collectives": 7, "pending": 0}, {"collectives": 7, "pending": 1}, {"collectives": 7, "pending": 0}], True),
        ([{"collectives": 7}, {"collectives": 7, "device_lost": True}, {"collectives": 7}], True),
    ],
    ids=["in step", "apart", "one left a collective under way", "one has no device any more"],
)
def test_ranks_that_all_failed_live_on_in_step_only(play, positions, kill):
    for rank, position in enumerate(positions):
        play.collection.reported(rank, bad(at=play.now, **position))
    outcome = play.tick()
    assert (outcome.cause, outcome.kill) == (0, kill)


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_death_of_a_rank_that_works(play):
    play.collection.died(1, play.now)
    assert play.tick() == Wait(until=play.now + REPORT_GRACE)
    for rank in (0, 2):
        play.collection.reported(rank, good())
    outcome = play.tick()
    assert (outcome.cause, outcome.late, outcome.kill) == (1, (1,), True)


def test_death_after_a_good_report_while_another_hangs():
    """Rank 1 hangs. What rank 0 reported is no help."""
    play = Play(world_size=2)
    play.collection.reported(0, good())
    play.pass_time(1)
    play.collection.died(0, play.now)
    assert play.tick() == Wait(until=play.now + REPORT_GRACE)
    outcome = play.pass_time(TIMEOUT)
    assert (outcome.cause, outcome.late, outcome.kill) == (0, (1,), True)


def test_death_after_a_good_report_while_others_work(play):
    play.collection.reported(0, good())
    play.collection.died(0, play.now)
    assert isinstance(play.tick(), Wait)
    play.collection.reported(1, good())
    assert isinstance(play.tick(), Wait)
    play.collection.reported(2, good())
    outcome = play.tick()
    assert (outcome.cause, outcome.late, outcome.kill) == (0, (), True)


def test_death_that_is_noticed_with_the_last_report(play):
    """The pool is killed, so its memory with the result is gone: that is no success."""
    for rank in range(3):
        play.collection.reported(rank, good())
    play.collection.died(2, play.now)
    outcome = play.tick(quiet=False)
    assert (outcome.cause, outcome.late, outcome.kill) == (2, (), True)


def test_death_of_all(play):
    for rank in range(3):
        play.collection.died(rank, play.now + rank)
    outcome = play.tick()
    assert (outcome.cause, outcome.late, outcome.kill) == (0, (0, 1, 2), True)


def test_a_rank_that_reports_an_error_and_ends_has_failed_by_the_error():
    """As every rank does that cannot start."""
    play = Play(world_size=2)
    play.collection.reported(1, bad(at=play.now))
    play.collection.died(1, play.now)
    play.collection.reported(0, good())
    outcome = play.tick()
    assert (outcome.cause, isinstance(outcome.replies[1], Failure), outcome.kill) == (1, True, True)


def test_death_causes_errors_that_are_noticed_before_it(play):
    play.collection.reported(0, bad(at=play.now))
    play.collection.died(1, play.now + 0.1)
    play.collection.reported(2, bad(at=play.now + 0.05))
    assert play.tick().cause == 1


# --- the deadline -----------------------------------------------------------------------------------------------------


def test_the_late_rank_is_named(play):
    for rank in (0, 2):
        play.collection.reported(rank, good())
    outcome = play.pass_time(TIMEOUT + 1)
    assert play.now == BEGAN + TIMEOUT
    assert (outcome.cause, outcome.late, outcome.stopped, outcome.kill) == (None, (1,), frozenset(), True)


def test_a_deadline_in_the_past():
    outcome = Play(timeout=-1.0).tick()
    assert (outcome.late, outcome.kill) == ((0, 1, 2), True)


def test_what_arrived_counts_after_the_deadline(play):
    play.now = BEGAN + 10 * TIMEOUT
    play.collection.tick(play.now)  # suspended once: the deadline was moved
    play.now += 10 * TIMEOUT
    assert isinstance(play.tick(quiet=False), Wait)
    for rank in range(3):
        play.collection.reported(rank, good())
    assert not play.tick(quiet=False).kill


def test_a_suspension_extends_the_deadline_once(play):
    play.pass_time(10)
    play.now += 1000
    assert play.tick() == Wait(until=BEGAN + TIMEOUT + 1000)
    play.now += SUSPENDED + 1
    assert play.tick() == Wait(until=BEGAN + TIMEOUT + 1000)
    assert isinstance(play.pass_time(TIMEOUT), Outcome)
    assert play.now == BEGAN + TIMEOUT + 1000


def test_a_short_gap_is_no_suspension(play):
    play.now += SUSPENDED
    assert play.tick() == Wait(until=BEGAN + TIMEOUT)


# --- stopped ranks ----------------------------------------------------------------------------------------------------


def test_a_stopped_rank_is_not_waited_for(play):
    play.collection.reported(0, good())
    outcome = play.pass_time(TIMEOUT, stopped={1})
    assert play.now == BEGAN + STOPPED_GRACE
    assert (outcome.cause, outcome.late, outcome.stopped, outcome.kill) == (None, (1, 2), frozenset({1}), True)


def test_a_rank_that_goes_on_starts_over(play):
    play.pass_time(STOPPED_GRACE - STEP, stopped={1})
    play.pass_time(STEP)
    assert isinstance(play.pass_time(STOPPED_GRACE - STEP, stopped={1}), Wait)
    assert play.pass_time(STEP, stopped={1}).stopped == {1}


def test_a_stopped_rank_that_has_reported_is_not_waited_for_anyway(play):
    play.collection.reported(1, good())
    assert isinstance(play.pass_time(2 * STOPPED_GRACE, stopped={1}), Wait)


def test_time_in_which_this_process_was_suspended_too_does_not_count(play):
    """Somebody who stops all processes does not let them go on at the same moment."""
    play.now += 1000
    assert isinstance(play.tick(stopped={1}), Wait)
    assert isinstance(play.pass_time(STOPPED_GRACE - STEP, stopped={1}), Wait)


def test_the_deadline_comes_first_where_it_is_shorter():
    play = Play(timeout=STOPPED_GRACE - 1)
    outcome = play.pass_time(TIMEOUT, stopped={1})
    assert (outcome.late, outcome.stopped) == ((0, 1, 2), frozenset())


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
