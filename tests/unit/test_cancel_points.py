"""How often ranks look for Cancel, and where they leave a call. Here threads, they leave at the same place whatever their speed,
and wait for nothing but the answer that needs none of them to go on."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cp_runtime.controller.calls import MOST_KINDS, Pace
from cp_runtime.pool.cancel import CancelPoints

RANKS, PLACES = 3, 12


def walk(points, *, pause=lambda: None, pledges=False, passed=lambda place: None):
    """Pass all places as a rank does. Returns the place left at, or None."""
    sure = False
    for place in range(1, PLACES + 1):
        pause()
        if points.leave():
            assert not sure
            return place
        passed(place)
        sure = pledges and points.pledge()
    return None


def cancel(ranks, seconds):
    """Ask all, some time later, and tell all, as a pool does."""
    time.sleep(seconds)
    place = max(points.ask() for points in ranks) + 1
    time.sleep(seconds)
    for points in ranks:
        points.decide(place)
    return place


def together(ranks, seconds=None, **how):
    for points in ranks:
        points.restart()
    with ThreadPoolExecutor(RANKS + 1) as pool:
        futures = [pool.submit(walk, points, **how) for points in ranks]
        place = None if seconds is None else pool.submit(cancel, ranks, seconds).result(timeout=10)
        return [future.result(timeout=10) for future in futures], place


@pytest.fixture
def ranks():
    return [CancelPoints() for _ in range(RANKS)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pledges", [False, True])
def test_all_leave_at_the_place_after_the_farthest(ranks, seed, pledges):
    rng = random.Random(seed)
    left, place = together(ranks, rng.random() * 0.02, pause=lambda: time.sleep(rng.random() * 0.004), pledges=pledges)
    assert left == [place if place <= PLACES else None] * RANKS


def test_the_next_call_begins_anew(ranks):
    assert together(ranks, 0.0, pause=lambda: time.sleep(0.005))[0] != [None] * RANKS
    assert together(ranks) == ([None] * RANKS, None)
    assert together(ranks, 0.0, pause=lambda: time.sleep(0.005))[0] != [None] * RANKS


def test_a_call_that_is_over_is_over(ranks):
    assert together(ranks)[0] == [None] * RANKS
    assert cancel(ranks, 0.0) == PLACES + 1


def test_ranks_that_wait_for_each_other_inside_of_a_module_all_leave(ranks):
    """One has passed a place that another has not: the other one is asked to stop there, and passes it all the same."""
    barrier, slow = threading.Barrier(RANKS), threading.Event()

    def module(place):
        if place == 3 and threading.current_thread().name.endswith("_0"):
            slow.wait(10)
        barrier.wait(10)

    with ThreadPoolExecutor(RANKS, "rank") as pool:
        futures = [pool.submit(walk, points, passed=module) for points in ranks]
        time.sleep(0.2)  # all are in module 3, or at its place
        asked = [points.ask() for points in ranks]
        slow.set()
        time.sleep(0.2)
        for points in ranks:
            points.decide(max(asked) + 1)
        assert [future.result(timeout=10) for future in futures] == [max(asked) + 1] * RANKS


def test_what_is_pledged_is_passed(ranks):
    first, other, _ = ranks
    assert not first.leave()
    assert first.pledge()
    assert [first.ask(), other.ask()] == [2, 0]
    assert not first.leave()  # the place that it has pledged, before anything is decided
    assert not first.pledge()  # another one may have to leave at the next
    for points in ranks:
        points.decide(4)
    assert first.pledge()  # now that is known
    assert [first.leave(), first.pledge(), first.leave()] == [False, False, True]
    assert [other.leave() for _ in range(4)] == [False, False, False, True]


def test_kinds_of_calls_that_alternate_keep_their_pace():
    """CFG halves of two lengths of text, and decodes in between."""
    pace = Pace()
    assert pace.modules_per_check("positive", 2) == 1  # nobody knows how long it takes
    for _ in range(3):
        pace.note("positive", 2, 2.0, 40)
        pace.note("negative", 2, 0.4, 40)
        pace.note("decode", 2, 5.0, 20)
    assert [pace.modules_per_check(kind, 2) for kind in ("positive", "negative", "decode")] == [2, 0, 1]


def test_fewer_ranks_take_longer():
    pace = Pace()
    pace.note("call", 4, 0.4, 40)
    assert (pace.modules_per_check("call", 4), pace.modules_per_check("call", 1)) == (0, 3)


def test_the_oldest_kind_is_forgotten():
    pace = Pace()
    for kind in range(MOST_KINDS + 1):
        pace.note(kind, 2, 0.1, 40)
        pace.note(0, 2, 0.1, 40)
    assert [pace.modules_per_check(kind, 2) for kind in (0, 1, 2, MOST_KINDS)] == [0, 1, 0, 0]
