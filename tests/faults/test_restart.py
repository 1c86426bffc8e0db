"""Case 43: Cancel, Ctrl-C, the status and other restarts while the restart route starts ranks."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.faults import SLACK, Faults, Stopwatch
from support.graphs import flux_prompt
from support.node_graphs import assert_right
from support.processes import wait_gone
from support.server import ComfyServer

CP = {"world_size": 2}
STATUS, RESTART = "/context_parallel/status", "/context_parallel/restart"


@pytest.fixture
def hanging_restart(comfyui_path, checkpoints_dir, tmp_path):
    """A server whose restart route waits for a rank that hangs at its start."""
    faults = Faults(tmp_path)
    options = {"models": checkpoints_dir, "env": faults.environment}
    with ThreadPoolExecutor(1) as thread, ComfyServer(comfyui_path, **options) as server:
        server.run(flux_prompt(cp=CP), timeout=120).check()
        faults.arm(1, "sleep", at="start")
        thread.submit(server.answer, RESTART, "POST")
        faults.wait_taken()
        yield server


def test_cancel_and_ctrl_c_while_a_restart_hangs(hanging_restart):
    server = hanging_restart
    prompt_id = server.queue(flux_prompt(cp=CP))
    server.wait_event(lambda e: e.type == "executing" and e.data.get("node") == "sampler" and e.data["prompt_id"] == prompt_id)
    time.sleep(0.5)
    watch = Stopwatch("43 Cancel while the restart route starts ranks, one of which hangs")
    server.interrupt()
    result = server.wait(prompt_id, 30)
    watch.within(2, "the prompt ends")
    assert result.status == "interrupted"
    process, ranks = psutil.Process(server.pid), server.workers()
    assert len(ranks) == 2
    watch = Stopwatch("43 Ctrl-C while the restart route starts ranks, one of which hangs")
    os.killpg(server.pid, signal.SIGINT)
    left = wait_gone([process, *ranks], 10 * SLACK)
    watch.within(10, "ComfyUI and its ranks are gone")
    assert left == []


def test_ten_restarts_at_once_are_one(fault_server, expected):
    before, starts = assert_right(fault_server, expected, CP), fault_server.log_text().count("starting 2 ranks")
    with ThreadPoolExecutor(10) as threads:
        answers = [threads.submit(fault_server.answer, RESTART, "POST") for _ in range(10)]
        slowest = 0.0
        while not all(answer.done() for answer in answers):
            asked = time.monotonic()
            fault_server.get(STATUS)
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.05)
    assert {answer.result()[0] for answer in answers} == {200}
    assert all(answer.result()[1]["restarted"] for answer in answers)
    assert fault_server.log_text().count("starting 2 ranks") == starts + 1
    assert not set(before) & set(fault_server.worker_pids())
    Stopwatch("43 ten restarts at once").within(1, "the status answers meanwhile", slowest)
    assert_right(fault_server, expected, CP)


def test_a_rank_that_dies_while_another_unloads_does_not_end_the_queue(fault_server, expected):
    """It has reported well by then, and the other one never does."""
    pids = assert_right(fault_server, expected, CP)
    os.kill(pids[1], signal.SIGSTOP)
    fault_server.free()
    time.sleep(2)
    os.kill(pids[0], signal.SIGKILL)
    assert_right(fault_server, expected, CP)


def test_the_status_holds_no_paths_and_no_tracebacks(fault_server, expected, faults):
    assert_right(fault_server, expected, CP)
    faults.arm(1, "error", module=1)
    fault_server.fails(flux_prompt(cp=CP), "Traceback of rank 1", timeout=120)
    assert fault_server.get(STATUS)["last_error"]["message"].endswith("failed: RuntimeError: injected: error")
