"""Case 44: a rank's process before it is a rank, and what may go wrong with it then."""

import _posixsubprocess
import contextlib
import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from faults.owner import Owner, namespaces
from support.faults import Stopwatch, wait_for
from support.pools import echo, make_pool, small_pool
from support.processes import descendants, wait_gone

from cp_runtime.errors import PoolError, PoolTimeout, RankError
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.launcher import child_environment
from cp_runtime.pool.processes import WAITING
from cp_runtime.pool.worker_pool import CallCancelled, WorkerPool

VALUE = torch.arange(5)


@pytest.fixture
def waiting():
    """Starts processes for pools of two ranks on CPUs ahead of them."""

    def start(count: int) -> list[psutil.Process]:
        WAITING.start(WorkerSite(), child_environment("cpu", 2), count)
        return [psutil.Process(process.pid) for process in WAITING._processes]

    yield start
    WAITING._end()


def pool_with(folder: Path, **modules: str) -> WorkerPool:
    """A pool whose processes are to import modules of this source."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return make_pool(site=WorkerSite(path=(str(folder),), preload=tuple(modules)))


def test_those_that_wait_become_ranks_and_the_others_end(waiting):
    ahead = waiting(3)
    assert waiting(3) == ahead  # the next prompt
    with small_pool() as pool:
        assert {*pool.pids} < {process.pid for process in ahead}
        assert torch.equal(echo(pool, VALUE), VALUE)
        assert wait_gone([process for process in ahead if process.pid not in pool.pids], 5) == []
    with small_pool() as pool:
        assert not {*pool.pids} & {process.pid for process in ahead}


def test_another_environment_gets_others(waiting, monkeypatch):
    """Libraries read variables when they are loaded. Our own reach a rank later."""
    ahead = waiting(2)
    monkeypatch.setenv("CP_PROFILE", "")
    assert waiting(2) == ahead
    monkeypatch.setenv("SOME_LIBRARY_THREADS", "3")
    with small_pool() as pool:
        assert not {*pool.pids} & {process.pid for process in ahead}
        assert wait_gone(ahead, 5) == []


def test_one_that_was_killed_while_it_waited_is_replaced(waiting):
    ahead = waiting(2)
    ahead[1].kill()
    wait_for(lambda: WAITING._processes[1].returncode == -signal.SIGKILL)
    with small_pool() as pool:
        assert pool.pids[0] == ahead[0].pid
        assert torch.equal(echo(pool, VALUE), VALUE)


def test_one_that_is_killed_as_it_is_needed_is_named(waiting, monkeypatch):
    """Between the look whether it lives, and its spec."""
    ahead, take = waiting(2), WAITING.take

    def kill(*asked):
        taken = take(*asked)
        taken[1].kill()
        assert taken[1].wait(5)
        return taken

    monkeypatch.setattr(WAITING, "take", kill)
    watch = Stopwatch("44 SIGKILL of a process before it is a rank")
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL: the process ended with SIGKILL"):
        make_pool().start()
    watch.within(2, "the start fails")
    assert wait_gone(ahead, 1) == []


SLOW = "import time\ntime.sleep(600)"


def test_cancel_while_they_import(tmp_path):
    pool = pool_with(tmp_path, slow=SLOW)
    asked = []
    watch = Stopwatch("44 Cancel while ranks import")

    def cancelled() -> bool:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] < 1:
            return False
        watch.began = asked[-1] if watch.began < asked[0] else watch.began
        return True

    with pytest.raises(CallCancelled):
        pool.start(cancelled)
    watch.within(2, "the start ends")
    assert all(process.returncode is not None for process in pool.processes)


STOPPED = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nimport time\ntime.sleep(600)"


@pytest.mark.parametrize("source", [SLOW, STOPPED], ids=["hangs", "is stopped"])
def test_an_import_that_never_ends_costs_the_deadline_of_a_start(tmp_path, monkeypatch, caplog, source):
    monkeypatch.setenv("CP_STARTUP_TIMEOUT", "2")
    caplog.set_level("INFO")
    pool, watch = pool_with(tmp_path, never=source), Stopwatch("44 an import never ends, budget 2 s")
    with pytest.raises(PoolTimeout, match=r"(?s)start timed out after 2 s; rank . \(pid \d+\) is furthest .* CP_STARTUP_TIMEOUT"):
        pool.start()
    assert watch.seconds >= 1.9
    watch.within(4, "the start fails")
    assert all(process.returncode is not None for process in pool.processes)
    assert ("never.py" in caplog.text) == (source is SLOW)  # the stacks, but of a process that is stopped


def test_a_module_that_cannot_be_imported_is_left_to_the_rank(tmp_path):
    pool = pool_with(tmp_path, missing="import no_such_module", fine="import pathlib\npathlib.Path(__file__ + '.done').touch()")
    try:
        pool.start()
        assert torch.equal(echo(pool, VALUE), VALUE)
        assert (tmp_path / "fine.py.done").exists()
    finally:
        pool.kill()


def test_one_that_fails_says_what_it_wrote_last(tmp_path):
    pool = pool_with(tmp_path, broken="import os\nprint('the disk is gone', flush=True)\nos._exit(3)")
    with pytest.raises(RankError, match=r"(?s)the process exited with code 3\..*wrote last:\nthe disk is gone"):
        pool.start()


def test_no_room_for_a_process_names_the_limit(monkeypatch):
    """The limit of a user does not hold for root, so that the system's answer has to be made up."""
    started, start = [], subprocess.Popen

    def refuse(*args, **kwargs):
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(PoolError, match=r"could not be started: .*ulimit -u.*pids\.max"):
        make_pool().start()
    wait_for(lambda: started[0].returncode == -signal.SIGKILL)


def test_ranks_that_are_started_as_for_users(monkeypatch):
    """Those of other tests are forked (see `support.preloaded`)."""
    monkeypatch.setattr(subprocess, "_fork_exec", _posixsubprocess.fork_exec, raising=False)
    with small_pool() as pool:
        assert {process.ppid() for process in map(psutil.Process, pool.pids)} == {os.getpid()}
        assert torch.equal(echo(pool, VALUE), VALUE)


def test_where_the_owner_is_process_1_of_a_container(temp):
    """The kernel gives it every process without a parent, and it is the parent that ranks look for."""
    command = namespaces("--pid", "--fork", "--kill-child", "--mount-proc")
    if command is None:
        pytest.skip("a first process needs unshare(1) and the right to make namespaces")
    with Owner(temp, wrapper=command, forked=False) as owner:
        owner.ask("start", pool="a")
        assert owner.ask("echo", pool="a")["same"]
        (first,) = psutil.Process(owner.pid).children()
        ranks = descendants(first.pid)
        assert len(ranks) == 2
        ranks[0].kill()
        with contextlib.suppress(Exception):
            owner.ask("echo", pool="a")
        wait_for(lambda: first.children() == [])  # no zombie either
