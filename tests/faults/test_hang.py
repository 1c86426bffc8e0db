"""Cases 8 to 14: a rank that does not go on costs one deadline, and the error names it."""

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.faults import SOAK, Stopwatch
from support.graphs import flux_prompt
from support.node_graphs import assert_right
from support.pools import echo, hold, make_pool, small_pool

from cp_runtime.errors import PoolTimeout
from cp_runtime.pool.failures import collect_stacks
from cp_runtime.system import system

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
    assert "raise step_timeout of CP Config" in message

    stacks = Path(re.search(r"Stacks of all ranks: (\S+\.txt)\.", message)[1])
    text = stacks.read_text()
    assert stacks.stat().st_mode & 0o777 == 0o600
    parts = dict(zip((0, 1), re.split(r"=== rank \d, ", text)[1:], strict=True))
    assert parts[rank].startswith(f"pid {pids[rank]}, {'stopped' if kind == 'stop' else ''}")
    assert "faulty_worker.py" in parts[rank], text
    assert "faulty_worker.py" not in parts[1 - rank], text
    assert "collectives.py" in parts[1 - rank], text  # it waits in a collective
    stacks.unlink()
    assert not set(pids) & set(assert_right(fault_server, expected, CP))


def test_a_deadline_in_the_past_returns_at_once():
    with small_pool() as pool:
        hold(pool, 1)
        watch = Stopwatch("12 a deadline already past")
        with pytest.raises(PoolTimeout):
            echo(pool, torch.ones(3), timeout=-1.0)
        watch.within(1, "the command fails")
        assert not pool.alive


def test_no_room_for_stacks_keeps_the_error(tmp_path, monkeypatch):
    with small_pool() as pool:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        hold(pool, 1)
        with pytest.raises(PoolTimeout, match=r"echo timed out after -1 s; .*No stacks of the ranks: .*No such file"):
            echo(pool, torch.ones(3), timeout=-1.0)
        assert not pool.alive


class Child(subprocess.Popen):
    """A process that can be asked for its stacks as a rank is."""

    @property
    def state(self):
        return system.process_state(self.pid)

    def write_stacks(self):
        with contextlib.closing(system.Messages({})) as messages:
            messages.request_stacks(self.pid)


def test_a_stopped_rank_writes_the_stack_it_was_stopped_at(tmp_path):
    """Once it runs again its main thread must not get past that place, whatever its other threads do."""
    code = (
        "import faulthandler, os, signal, sys, threading, time\n"
        "out = open(sys.argv[1], 'w')\n"
        "faulthandler.register(signal.SIGUSR1, out, all_threads=True)\n"
        "for _ in range(8): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def stopped_here(): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(flush=True)\n"
        "stopped_here()\n"
        "time.sleep(600)\n"
    )
    for _ in range(20 if SOAK else 5):
        target = tmp_path / "stacks"
        target.unlink(missing_ok=True)
        process = Child([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            while process.state != "stopped":
                time.sleep(0.01)
            with target.open("rb") as file:
                written = collect_stacks([file.fileno()], [process], "title")
            assert "stopped_here" in written.read_text()
            written.unlink()
        finally:
            process.kill()
            process.communicate()


def test_a_start_that_hangs_ends_within_its_budget(start_faults, monkeypatch):
    monkeypatch.setenv("CP_STARTUP_TIMEOUT", "12")
    start_faults.arm(1, "sleep", at="start")
    pool = make_pool()
    watch = Stopwatch("13 a rank hangs at start, budget 12 s")
    with pytest.raises(PoolTimeout, match=r"start timed out after 12 s; .*raise the environment variable CP_STARTUP_TIMEOUT"):
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
