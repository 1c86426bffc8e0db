"""Ranks of Windows die, hang and are cancelled in the middle of a prompt; the next one runs."""

import pytest
from support.graphs import flux_prompt
from support.latents import assert_close

CP = {"world_size": 2, "step_timeout": 5.0}
ENDS = {
    "exit": "the process exited with code 1",
    "segv": "the process ended with STATUS_ACCESS_VIOLATION",
    "error": "injected: error",
}


@pytest.fixture(scope="module")
def right(server):
    """Check that ranks give the stock picture."""
    stock = server.sample(flux_prompt())

    def check():
        assert_close(server.sample(flux_prompt(cp=CP), timeout=120), stock)
        return server.worker_pids()

    return check


@pytest.mark.parametrize("kind", ENDS)
def test_a_rank_that_ends_is_named(server, faults, right, kind):
    pids = right()
    faults.arm(1, kind, module=3)
    message = server.run(flux_prompt(cp=CP)).error.exception_message
    assert f"rank 1 (pid {pids[1]}) failed" in message
    assert ENDS[kind] in message
    right()


@pytest.mark.parametrize("kind", ["sleep", "lock"])
def test_a_rank_that_hangs_is_named_with_its_stack(server, faults, right, kind):
    pids = right()
    faults.arm(1, kind, module=3)
    message = server.run(flux_prompt(cp=CP)).error.exception_message
    assert f"rank 1 (pid {pids[1]}) is furthest behind" in message
    assert "Its main thread" in message
    assert "faulty_worker.py" in message
    right()


def test_cancel_in_the_middle(server, right):
    pids = right()
    server.end_in_the_middle(server.queue(flux_prompt(steps=500, cp=CP)), "Cancel")
    assert right() == pids


def test_restart(server, right):
    pids = right()
    assert server.post("/context_parallel/restart", timeout=180)["restarted"]
    assert not set(pids) & set(right())
