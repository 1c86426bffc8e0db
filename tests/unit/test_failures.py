"""Which rank is named where several died."""

import signal

import pytest

from cp_runtime.pool.failures import death, first_death
from cp_runtime.pool.forking import RankProcess

KILLED, LOST_ITS_PEER = -signal.SIGKILL, 1


def ended(*codes):
    """Ranks that ended so."""
    processes = [RankProcess(None) for _ in codes]
    for number, (process, code) in enumerate(zip(processes, codes, strict=True)):
        process.started(100 + number)
        process.ended(code)
    return processes


@pytest.mark.parametrize(
    ("codes", "noticed", "named"),
    [
        ((KILLED, LOST_ITS_PEER, LOST_ITS_PEER), 1, 0),
        ((LOST_ITS_PEER, LOST_ITS_PEER, KILLED), 0, 2),
        ((KILLED, KILLED, LOST_ITS_PEER), 1, 1),
        ((LOST_ITS_PEER, LOST_ITS_PEER), 1, 1),
        ((0, LOST_ITS_PEER), 0, 0),
    ],
)
def test_a_rank_that_was_killed_comes_before_one_that_lost_it(codes, noticed, named):
    processes = ended(*codes)
    assert first_death(frozenset(range(len(codes))), noticed, processes) == named
    assert death(named, processes[named], None).rank == named
