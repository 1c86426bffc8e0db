"""Case 46: faults with weights of which every rank keeps a part, while they are loaded and while blocks are on their way."""

import os
import signal

import pytest
from support.faults import Stopwatch
from support.graphs import flux_prompt
from support.node_graphs import assert_right

DEADLINE = 4.0
CP = {"world_size": 3, "weights": "sharded", "step_timeout": DEADLINE}
LORA = {"loras": ["flux_lora"]}  # what the ranks hold does not count: every block is loaded again


@pytest.fixture(scope="module")
def with_lora(fault_server):
    return fault_server.sample(flux_prompt(**LORA))


def failure(server, **settings):
    """When a prompt failed, and its message."""
    return server.failed_at(server.queue(flux_prompt(cp=CP, **settings)))


@pytest.mark.parametrize(
    ("where", "kind", "rank"),
    [
        ("while it loads", "kill", 0),
        pytest.param("while it loads", "exit", 2, marks=pytest.mark.soak),
        ("in a call", "kill", 0),
    ],
)
def test_a_rank_ends(fault_server, expected, with_lora, faults, where, kind, rank):
    """Its peers wait for its part of a block."""
    place, settings = ("module", {}) if where == "in a call" else ("weights", LORA)
    pids = assert_right(fault_server, expected, CP)
    faults.arm(rank, kind, at=place, module=3)
    watch = Stopwatch(f"46 shared weights, rank {rank} of 3 ends {where}: {kind}")
    at, message = failure(fault_server, **settings)
    watch.within(3, "the prompt fails, from its start", at - watch.began)
    assert f"rank {rank} (pid {pids[rank]}) failed: " in message
    assert {"kill": "SIGKILL", "exit": "exited with code 1"}[kind] in message
    assert not faults.waiting
    assert_right(fault_server, with_lora if settings else expected, CP, **settings)


def test_no_memory_while_a_model_loads(fault_server, expected, with_lora, faults):
    """The other ranks have their parts already. Room is made, and the prompt goes on."""
    assert_right(fault_server, expected, CP)
    faults.arm(1, "oom", at="weights", module=3)
    assert_right(fault_server, with_lora, CP, **LORA)
    assert not faults.waiting
    assert "rank 1 ran out of memory; making room" in fault_server.log_text()
    faults.arm(1, "oom", at="weights", module=3, times=2)
    _, message = failure(fault_server)
    assert "rank 1 (pid " in message
    assert "OutOfMemoryError" in message
    assert_right(fault_server, expected, CP)


def test_a_model_whose_load_ran_out_of_memory_takes_less_of_it(fault_server, expected, faults):
    """Not only one whose call did."""
    cp = {**CP, "weights": "auto", "memory_per_rank": 8.0}
    faults.arm(1, "oom", at="load")
    assert "OutOfMemoryError" in fault_server.failed_at(fault_server.queue(flux_prompt(cp=cp)))[1]
    assert_right(fault_server, expected, cp)
    assert fault_server.status()["weights"]["flux.safetensors"].startswith(
        "offloaded: "
    )  # of so small a model a part and two blocks are no less


def test_a_rank_hangs_in_a_call(fault_server, expected, faults):
    """The others wait in a gather: the one that they wait for is named."""
    pids = assert_right(fault_server, expected, CP)
    faults.arm(2, "sleep", module=3)
    watch = Stopwatch("46 shared weights, rank 2 of 3 hangs in a call")
    at, message = failure(fault_server)
    watch.within(DEADLINE + 2, "the prompt fails, from its start", at - watch.began)
    assert f"rank 2 (pid {pids[2]}) is furthest behind" in message
    assert_right(fault_server, expected, CP)


@pytest.mark.soak
def test_killed_while_idle(fault_server, expected):
    pids = assert_right(fault_server, expected, CP)
    os.kill(pids[1], signal.SIGKILL)
    _, message = failure(fault_server)
    assert f"rank 1 (pid {pids[1]}) failed: SIGKILL" in message
    assert_right(fault_server, expected, CP)


def test_restart_in_a_call(fault_server, expected):
    pids = assert_right(fault_server, expected, CP)
    prompt_id = fault_server.queue(flux_prompt(cp=CP, width=1024, height=1024, steps=20))  # seconds per step
    fault_server.wait_status(lambda status: status["ranks"][0]["modules"])
    fault_server.post("/context_parallel/restart", timeout=60)
    assert "restarted on request" in fault_server.wait(prompt_id).error.exception_message
    assert not set(pids) & set(assert_right(fault_server, expected, CP))
