"""Case 44: the process that ranks are forked from, and what may go wrong with it."""

import ctypes
import errno
import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.faults import Stopwatch
from support.pools import echo, make_pool, small_pool
from support.processes import alive, wait_gone

from cp_runtime.errors import PoolError, PoolTimeout, RankError
from cp_runtime.pool import fork_server
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.forking import FORK_SERVERS
from cp_runtime.pool.worker_pool import CallCancelled, WorkerPool

VALUE = torch.arange(5)
PR_SET_CHILD_SUBREAPER = 36


def parent(pid: int) -> psutil.Process:
    """What a rank was forked from."""
    found = psutil.Process(pid).parent()
    assert found is not None
    return found


def pool_with(folder: Path, **modules: str) -> WorkerPool:
    """A pool whose fork server is to import modules of this source."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return make_pool(site=WorkerSite(path=(str(folder),), preload=tuple(modules)))


def test_restarted_ranks_come_from_the_same_process():
    with small_pool() as pool:
        first = parent(pool.pids[0])
        assert first.pid == parent(pool.pids[1]).pid != os.getpid()
        assert torch.equal(echo(pool, VALUE), VALUE)
    with small_pool(3) as pool:
        assert {parent(pid).pid for pid in pool.pids} == {first.pid}
        assert torch.equal(echo(pool, VALUE), VALUE)


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_its_death_ends_the_ranks_and_says_so(moment):
    with small_pool() as pool:
        server, ranks = parent(pool.pids[0]), [psutil.Process(pid) for pid in pool.pids]
        watch = Stopwatch(f"44 SIGKILL of the fork server, {moment}")

        def kill() -> bool:
            if alive(server):
                server.kill()
            return False

        if moment == "idle":
            kill()
            assert wait_gone(ranks, 2) == []
        else:
            ranks[1].suspend()
        with pytest.raises(RankError, match=rf"the process that ranks are forked from \(pid {server.pid}\) ended, exit code -9"):
            echo(pool, VALUE, cancelled=None if moment == "idle" else kill)
        watch.within(2, "the command fails")
        assert not any(map(alive, ranks))
    with small_pool() as pool:
        assert parent(pool.pids[0]).pid != server.pid
        assert torch.equal(echo(pool, VALUE), VALUE)


def test_its_ranks_leave_no_zombies_where_this_process_gets_them():
    """As the first process of a container does, to which the kernel gives every process without a parent."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        with small_pool() as pool:
            server, ranks = parent(pool.pids[0]), [psutil.Process(pid) for pid in pool.pids]
            server.kill()
            assert all(process.wait(5) for process in pool.processes)
            assert [rank for rank in (*ranks, server) if rank.is_running()] == []  # a zombie is
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_another_environment_gets_another_one(monkeypatch):
    """Libraries read variables when they are loaded. Ranks that run keep theirs; their fork server ends with the last of them."""
    with small_pool() as first:
        old = parent(first.pids[0])
        monkeypatch.setenv("SOME_LIBRARY_THREADS", "3")
        with small_pool() as second:
            assert parent(second.pids[0]).pid != old.pid
            assert torch.equal(echo(first, VALUE), VALUE)
            assert torch.equal(echo(second, VALUE), VALUE)
            assert alive(old)
    assert wait_gone([old], 5) == []


def test_our_own_variables_reach_ranks_without_another_one(monkeypatch):
    with small_pool() as pool:
        first = parent(pool.pids[0])
    monkeypatch.setenv("CP_PROFILE", "")
    with small_pool() as pool:
        assert parent(pool.pids[0]).pid == first.pid


LATER = [pytest.param(moment, marks=pytest.mark.soak) for moment in ("before a rank dies", "before a Cancel", "before the end")]


@pytest.mark.parametrize("moment", ["before a start", *LATER])
def test_one_that_is_stopped_runs_on_when_it_is_needed(moment, caplog):
    """It can neither fork a rank nor say that one has ended."""
    with small_pool(1 if moment == "before a start" else 3) as pool:
        server, ranks = parent(pool.pids[0]), [psutil.Process(pid) for pid in pool.pids]
        if moment == "before a start":
            pool.kill()
        server.suspend()
        watch = Stopwatch(f"44 SIGSTOP of the fork server, {moment}")
        if moment == "before a start":
            with small_pool(3) as restarted:
                assert parent(restarted.pids[0]).pid == server.pid
            watch.within(6, "the start and the end")
        elif moment == "before a rank dies":
            ranks[1].kill()
            with pytest.raises(RankError, match=r"rank 1 .*SIGKILL: the process was ended by signal SIGKILL"):
                echo(pool, VALUE)
            watch.within(2, "the command fails")
        elif moment == "before a Cancel":
            ranks[1].suspend()
            with pytest.raises(CallCancelled):
                echo(pool, VALUE, cancelled=lambda: True)
            watch.within(2, "the command ends")
        else:
            pool.close()
            watch.within(2, "the pool ends")
        assert wait_gone(ranks, 1) == []
    assert f"(pid {server.pid}) was stopped by a signal (state T); it runs on now" in caplog.text
    assert "did not end" not in caplog.text


def test_one_that_does_not_run_on_ends_with_its_ranks(monkeypatch, caplog):
    """As in a frozen control group, where it gets no signal but SIGKILL."""
    monkeypatch.setenv("CP_STARTUP_TIMEOUT", "1")
    with small_pool(1) as pool:
        server = parent(pool.pids[0])
    monkeypatch.setattr("cp_runtime.pool.forking.ForkServer.wake", lambda _: None)
    server.suspend()
    pool, watch = make_pool(3), Stopwatch("44 the fork server does not answer")
    with pytest.raises(
        PoolTimeout, match=rf"after 1 s; .* \(pid {server.pid}, stopped\) does not answer and has not started rank 0\."
    ):
        pool.start()
    watch.within(3, "the start fails")
    assert not alive(server)
    assert "did not end" not in caplog.text


UNFIT = {
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "a device": "import os\nKEPT = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)",
}


@pytest.mark.parametrize("what", ["a thread", pytest.param("a device", marks=pytest.mark.soak)])
def test_a_module_that_makes_it_unfit_is_left_out(tmp_path, what):
    """The others are imported; ranks run."""
    mark = "import os, pathlib\npathlib.Path(__file__).with_suffix(f'.{os.getpid()}').touch()\n"
    pool = pool_with(tmp_path, unfit=mark + UNFIT[what], missing="import no_such_module", fine=mark)
    try:
        pool.start()
        server = parent(pool.pids[0])
        assert torch.equal(echo(pool, VALUE), VALUE)
        assert server.num_threads() == 1
        assert server.cmdline()[-1] == "unfit"
        assert [path.name for path in sorted(tmp_path.glob("*.[0-9]*"))] == [f"fine.{server.pid}", f"unfit.{server.pid}"]
    finally:
        pool.kill()


SLOW = "import time\ntime.sleep(600)"


def test_cancel_while_it_imports(tmp_path):
    pool = pool_with(tmp_path, slow=SLOW)
    asked = []
    watch = Stopwatch("44 Cancel while the fork server imports")

    def cancelled() -> bool:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] < 1:
            return False
        watch.began = asked[-1] if watch.began < asked[0] else watch.began
        return True

    with pytest.raises(CallCancelled):
        pool.start(cancelled)
    watch.within(2, "the start ends")
    with small_pool() as pool:
        assert torch.equal(echo(pool, VALUE), VALUE)


def test_an_import_that_never_ends_costs_the_deadline_of_a_start(tmp_path, monkeypatch):
    monkeypatch.setenv("CP_STARTUP_TIMEOUT", "2")
    pool = pool_with(tmp_path, slow=SLOW)
    began = time.monotonic()
    with pytest.raises(PoolTimeout, match=r"after 2 s; the process .* still imports .* CP_STARTUP_TIMEOUT"):
        pool.start()
    assert time.monotonic() - began >= 1.9
    assert [process.pid for process in pool.processes] == [0, 0]


def test_one_that_fails_says_what_it_wrote_last(tmp_path):
    pool = pool_with(tmp_path, broken="import os\nprint('the disk is gone', flush=True)\nos._exit(3)")
    with pytest.raises(PoolError, match=r"(?s)forked from \(pid \d+\) ended, exit code 3\..*wrote last:\nthe disk is gone"):
        pool.start()


def test_no_room_for_a_process_is_reported_by_number(monkeypatch):
    """The limit of a user does not hold for root, so that the system's answer has to be made up."""

    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fork_server.Server(theirs)._start(7, [])
        assert json.loads(ours.recv(1000)) == {"id": 7, "errno": errno.EAGAIN}


def test_a_rank_that_could_not_be_forked_names_the_limit(monkeypatch):
    server = FORK_SERVERS.get(WorkerSite(), dict(os.environ))
    monkeypatch.setattr(FORK_SERVERS, "get", lambda *_: server)
    take = server._take

    def refuse(answer: dict[str, int]) -> None:
        take({"id": answer["id"], "errno": errno.EAGAIN} if "pid" in answer else answer)

    monkeypatch.setattr(server, "_take", refuse)
    with pytest.raises(PoolError, match=r"could not be started: .*ulimit -u.*pids\.max"):
        make_pool().start()
