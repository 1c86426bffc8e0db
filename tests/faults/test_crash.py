"""Cases 1 to 7: a rank that ends, whatever ends it, fails one prompt, and the next one is right."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch
from support.faults import SOAK, Stopwatch
from support.graphs import flux_prompt
from support.modes import by_turns
from support.node_graphs import assert_right
from support.pools import echo, small_pool
from support.processes import wait_gone

from cp_runtime.errors import PoolError

CP = {"world_size": 3}
# About 1,000 tokens: steps of a few tenths of a second here, so that faults hit a running call.
LONG = {"width": 512, "height": 512, "steps": 60}
RANKS = (0, 1, 2) if SOAK else (0,)


@pytest.mark.parametrize("rank", RANKS)
def test_killed_while_idle(fault_server, expected, rank):
    case = f"1 SIGKILL of rank {rank} of 3 while idle"
    pids = assert_right(fault_server, expected, CP)
    killed = psutil.Process(pids[rank])  # before: it may be gone at once
    killed.kill()
    assert wait_gone([killed], 2) == []
    watch = Stopwatch(case)
    at, message = fault_server.failed_at(fault_server.queue(flux_prompt(cp=CP)))
    watch.within(1, "the next prompt fails", at - watch.began)
    assert f"rank {rank} (pid {pids[rank]}) failed: SIGKILL" in message
    assert not set(pids) & set(assert_right(fault_server, expected, CP))


@pytest.mark.parametrize("rank", RANKS)
def test_killed_while_the_others_are_in_a_collective(fault_server, expected, rank):
    case = f"2 SIGKILL of rank {rank} of 3 in a call"
    pids = assert_right(fault_server, expected, CP)
    siblings = [psutil.Process(pid) for pid in pids]
    prompt_id = fault_server.queue(flux_prompt(cp=CP, **LONG))
    fault_server.wait_for_step(prompt_id)
    watch = Stopwatch(case)
    os.kill(pids[rank], signal.SIGKILL)
    gone = wait_gone(siblings, 8)
    watch.within(2, "all ranks are gone")
    assert gone == []
    at, message = fault_server.failed_at(prompt_id)
    watch.within(1, "the prompt fails", at - watch.began)
    assert f"rank {rank} (pid {pids[rank]}) failed: SIGKILL" in message
    assert_right(fault_server, expected, CP)


ENDS = {
    "exit": "ProcessExit: the process exited with code 1",
    "sysexit": "ProcessExit: the process exited with code 0",
    "segv": "SIGSEGV: the process ended with SIGSEGV",
    "uncaught": "BaseException: injected: uncaught",
    "leave a child": "SIGKILL: the process ended with SIGKILL",  # its channel stays open
}


@pytest.mark.parametrize("kind", by_turns(ENDS, 2))
def test_ways_to_end_are_told_apart(fault_server, expected, faults, kind):
    pids = assert_right(fault_server, expected, CP)
    faults.arm(1, kind, module=3)
    watch = Stopwatch(f"3 a rank ends in a call: {kind}")
    at, message = fault_server.failed_at(fault_server.queue(flux_prompt(cp=CP)))
    watch.within(2, "the prompt fails, from its start", at - watch.began)
    assert f"rank 1 (pid {pids[1]}) failed: " in message
    assert ENDS[kind] in message
    assert faults.waiting == []
    assert_right(fault_server, expected, CP)


def test_the_traceback_of_the_rank_that_failed_is_the_cause(fault_server, expected, faults):
    pids = assert_right(fault_server, expected, CP)
    faults.arm(2, "error", module=3)
    watch = Stopwatch("4 an exception on rank 2 of 3")
    at, message = fault_server.failed_at(fault_server.queue(flux_prompt(cp=CP)))
    watch.within(3, "the prompt fails, from its start", at - watch.began)
    first, _, trace = message.partition("Traceback of rank 2:")
    assert first.startswith(f"rank 2 (pid {pids[2]}) failed: RuntimeError: injected: error")
    assert "faulty_worker.py" in trace
    assert "run_sharded" in trace
    assert_right(fault_server, expected, CP)


def test_two_ranks_fail_at_the_same_time(fault_server, expected, faults):
    """One report, that of a rank that failed by itself, and not what its end did to others."""
    pids = assert_right(fault_server, expected, CP)
    for rank in (1, 2):
        faults.arm(rank, "error", module=1)  # before the first collective: neither waits for the other
    _, message = fault_server.failed_at(fault_server.queue(flux_prompt(cp=CP)))
    assert message.count(") failed: ") == 1
    assert message.startswith(
        (f"rank 1 (pid {pids[1]}) failed: RuntimeError: inj", f"rank 2 (pid {pids[2]}) failed: RuntimeError: inj")
    )
    assert faults.waiting == []
    assert_right(fault_server, expected, CP)


def test_an_error_that_all_ranks_share_keeps_them(fault_server, expected):
    """Text of another model: a mistake of the graph, not of a rank."""
    pids = assert_right(fault_server, expected, CP)
    prompt = flux_prompt(cp=CP)
    prompt["positive"]["inputs"]["width"] += 8
    fault_server.fails(prompt, "The text encoder does not fit the model")
    assert assert_right(fault_server, expected, CP) == pids


def echo_while_rank_0_dies(value):
    """The error, or None where the result was there first and is right."""
    with small_pool() as pool:
        assert torch.equal(echo(pool, value), value)
        begun = pool.shared.response.view(value.nbytes)[:1]  # the first byte of the result
        before, over = int(begun), threading.Event()
        watch = Stopwatch("7 rank 0 dies while it hands over 80 MB")

        def kill_once_begun() -> None:
            while int(begun) == before and not over.is_set():
                pass
            watch.began = time.monotonic()
            os.kill(pool.pids[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_once_begun)
        killer.start()
        try:
            assert torch.equal(echo(pool, -value), -value)
        except PoolError as error:
            watch.within(2, "the command fails")
            return str(error)
        finally:
            over.set()
            killer.join()
    return None


def test_a_result_cut_off_by_death_is_not_taken_for_one():
    """The report comes when all of the result lies there. The kill may come too late; then the result must be right."""
    value = torch.arange(1, (20 << 20) + 1, dtype=torch.int32)
    error = next(filter(None, (echo_while_rank_0_dies(value) for _ in range(10))))
    assert "rank 0" in error
    assert "SIGKILL" in error
