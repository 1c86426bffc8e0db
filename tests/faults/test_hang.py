"""Cases 8 to 14: a rank that does not go on costs one deadline, and the error names it."""

import re
import time

import pytest
import torch
from support.faults import SOAK, Stopwatch
from support.graphs import flux_prompt
from support.node_graphs import assert_right
from support.pools import echo, hold, make_pool, small_pool

from cp_runtime.errors import PoolTimeout

DEADLINE = 3.5
CP = {"world_size": 2, "step_timeout": DEADLINE}
SELDOM = [("sleep", 0), ("sleep", 1), ("spin", 1), ("lock", 1)] if SOAK else [("spin", 1)]

HANGS = {"sleep": "8 a rank sleeps", "stop": "9 SIGSTOP", "spin": "10 a loop in Python", "lock": "11 Python's lock held in C"}


@pytest.mark.parametrize(("kind", "rank"), [("stop", 1), ("lock", 0), *SELDOM])
def test_a_rank_that_hangs_is_named(fault_server, expected, faults, kind, rank):
    pids = assert_right(fault_server, expected, CP)
    faults.arm(rank, kind, module=3)
    prompt_id = fault_server.queue(flux_prompt(cp=CP))
    faults.wait_taken()
    watch = Stopwatch(f"{HANGS[kind]} (rank {rank} of 2)")
    at, message = fault_server.failed_at(prompt_id)
    watch.within(DEADLINE + 1, "the prompt fails", at - watch.began)
    assert f"rank {rank} (pid {pids[rank]}) is furthest behind" in message
    assert ("without a sign of life" in message) == (kind in ("stop", "lock"))
    assert "raise “longest call, in seconds” of CP Config" in message

    assert ("Its main thread" in message) == (kind != "stop")  # which writes nothing
    assert ("faulty_worker.py" in message) == (kind != "stop")
    log = fault_server.log_text()
    assert f"[rank {1 - rank}]" in log
    assert re.search(rf"\[rank {1 - rank}\] +File .*collectives\.py", log)  # the other one waits in a collective
    assert not set(pids) & set(assert_right(fault_server, expected, CP))


def test_a_deadline_in_the_past_returns_at_once():
    with small_pool() as pool:
        hold(pool, 1)
        watch = Stopwatch("12 a deadline already past")
        with pytest.raises(PoolTimeout):
            echo(pool, torch.ones(3), timeout=-1.0)
        watch.within(1, "the command fails")
        assert not pool.alive


def test_a_start_that_hangs_ends_within_its_budget(start_faults, monkeypatch):
    monkeypatch.setenv("CP_STARTUP_TIMEOUT", "12")
    start_faults.arm(1, "sleep", at="start")
    pool = make_pool()
    watch = Stopwatch("13 a rank hangs at start, budget 12 s")
    with pytest.raises(PoolTimeout, match=r"(?s)start timed out after 12 s; .*raise the environment variable CP_STARTUP_TIMEOUT"):
        pool.start()
    assert watch.seconds >= 0.9 * 12
    watch.within(13, "start fails")
    assert start_faults.waiting == []
    assert all(process.returncode is not None for process in pool.processes)


def test_a_slow_first_step_is_not_killed(fault_server, expected, faults):
    """Compilation and the move to the device may take longer than a step is allowed to."""
    fault_server.free_first()
    faults.arm(1, "slow", module=1, seconds=DEADLINE / 4)
    began = time.monotonic()
    assert_right(fault_server, expected, CP)
    assert time.monotonic() - began > DEADLINE
    assert faults.waiting == []


def test_a_model_that_a_rank_has_to_load_again_is_not_killed(fault_server, expected, faults):
    """A rank's own ComfyUI may take the model from its device, which nobody else is told of."""
    pids = assert_right(fault_server, expected, CP)
    pieces = {"kind": "slow", "at": "weights", "seconds": DEADLINE / 75}  # about a hundred of them
    faults.arm(1, "evict", at="call", then=pieces)
    began = time.monotonic()
    assert assert_right(fault_server, expected, CP) == pids
    assert time.monotonic() - began > DEADLINE
    assert faults.waiting == []
