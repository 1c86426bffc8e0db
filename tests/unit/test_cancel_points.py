"""How often ranks look for Cancel. Here threads, they leave a call at the same place whatever their speed, and never wait for one
that has left."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cp_runtime.controller.calls import KINDS, Pace
from cp_runtime.pool.board import CancelPoints

RANKS, PLACES = 3, 12


def walk(points, *, asked_at, stops_at=None, pause=lambda: None, lead=1):
    """Pass all places as a rank does; rank 0 hears of Cancel at place `asked_at`. Returns the place left at, or None."""
    sure = False
    try:
        for place in range(1, PLACES + 1):
            pause()
            if place == stops_at:
                return None
            if points.leave(lambda place=place: place == asked_at, lead):
                assert not sure
                return place
            sure = points.pass_next(lead)
            assert sure or points._rank or asked_at == place - lead + 1  # rank 0, which decides, is never unsure
    finally:
        points.end()
    return None


def together(word, **by_rank):
    ranks = [CancelPoints(word, rank) for rank in range(RANKS)]
    word.zero_()
    for points in ranks:
        points.restart()
    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(walk, points, **by_rank.get(f"rank{r}", by_rank["all"])) for r, points in enumerate(ranks)]
        return [future.result(timeout=10) for future in futures]


@pytest.fixture
def word():
    return torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize("asked_at", [None, 1, 5, PLACES - 1, PLACES])
@pytest.mark.parametrize(("seed", "lead"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 3)])
def test_all_leave_at_the_place_after_the_one_where_cancel_was_seen(word, asked_at, seed, lead):
    """Or three places after it, where ranks may be so far ahead."""
    rng = random.Random(seed)
    left = together(word, all={"asked_at": asked_at, "pause": lambda: time.sleep(rng.random() * 0.004), "lead": lead})
    assert left == [asked_at + lead if asked_at and asked_at + lead <= PLACES else None] * RANKS


def test_the_next_call_begins_anew(word):
    assert together(word, all={"asked_at": 3}) == [4] * RANKS
    assert together(word, all={"asked_at": None}) == [None] * RANKS
    assert together(word, all={"asked_at": 1}) == [2] * RANKS


@pytest.mark.parametrize("stops_at", [1, 4])
def test_nobody_waits_for_rank_0_when_it_failed(word, stops_at):
    assert together(word, all={"asked_at": None}, rank0={"asked_at": None, "stops_at": stops_at}) == [None] * RANKS


def test_a_decision_that_rank_0_took_before_it_failed_holds(word):
    assert together(word, all={"asked_at": None}, rank0={"asked_at": 3, "stops_at": 4}) == [None, 4, 4]


def test_a_rank_may_be_one_interval_ahead_of_rank_0(word):
    first, second = (CancelPoints(word, rank) for rank in range(2))
    first.restart()
    second.restart()
    assert not second.leave(bool)  # rank 0 has passed nothing yet
    assert not first.leave(lambda: True)
    assert second.leave(bool)
    assert first.leave(bool)


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
    for kind in range(KINDS + 1):
        pace.note(kind, 2, 0.1, 40)
        pace.note(0, 2, 0.1, 40)
    assert [pace.modules_per_check(kind, 2) for kind in (0, 1, 2, KINDS)] == [0, 1, 0, 0]
