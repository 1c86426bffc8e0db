"""What the pool promises its caller, whatever happens to ranks and when: one kind of error, in time, and no half-dead pool."""

import errno
import os
import resource
import signal
import socket
import time

import psutil
import pytest
import torch
from support.faults import Stopwatch, wait_for
from support.pools import echo, make_pool, request_echo, small_pool

from cp_runtime.errors import ContextParallelError, PoolError, ProtocolError, RankError
from cp_runtime.pool.blocks import KEEP_BYTES
from cp_runtime.pool.frames import MAX_HEADER, Frame
from cp_runtime.pool.messages import Beat, Echo, Value, pack

USUAL_LIMIT = 1024  # of open files


def no_room(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rank_dies_after_its_report_while_another_hangs():
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
        time.sleep(1)  # rank 1 waits for the next command; what rank 0 sends arrives even while it is stopped
        os.kill(pool.pids[1], signal.SIGSTOP)
        watches: list[Stopwatch] = []

        def kill_rank_0_once_it_has_reported() -> bool:
            if pool.waiting_for == [1] and not watches:
                watches.append(Stopwatch("2 SIGKILL of a rank that has reported, while another is stopped"))
                os.kill(pool.pids[0], signal.SIGKILL)
            return False

        with pytest.raises(RankError, match=r"rank 0 .*SIGKILL") as caught:
            echo(pool, torch.ones(3), timeout=60, cancelled=kill_rank_0_once_it_has_reported)
        watches[0].within(2, "the command fails")
        assert caught.value.rank == 0
        assert not pool.alive


def test_a_level_without_a_name(caplog):
    """Nodes silence the log with one while they work."""
    caplog.set_level(51)
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))


def test_a_rank_dies_right_after_its_hello():
    """Its hello and its death are noticed together, with the hellos of all others."""
    pool, killed = make_pool(), []

    def kill_rank_0_after_all_hellos() -> bool:
        if not killed:
            wait_for(lambda: pool._messages.qsize() >= len(pool.waiting_for))  # what others sent was taken
            killed.append(pool.processes[0])
            pool.processes[0].kill()
            pool.processes[0].wait()
        return False

    with pytest.raises(RankError, match=r"rank 0 .*SIGKILL"):
        pool.start(kill_rank_0_after_all_hellos)
    assert killed
    assert not pool.alive
    with pytest.raises(PoolError, match="not running"):
        echo(pool, torch.ones(1))


def test_progress_is_of_the_command_that_runs():
    """The panel and a Restart would take a call for running that has ended, up to the next heartbeat."""
    pool = make_pool()
    pool.command, pool._seq = "call", 3

    def modules_after(seq: int) -> int:
        pool._on_frame(pool._messages, 0, Frame(pack(Beat(modules=5), seq)))
        return pool.progress(0).at.modules

    assert [modules_after(seq) for seq in (0, 2, 3)] == [0, 0, 5]
    pool._seq = 4
    assert pool.progress(0).at.modules == 0
    assert modules_after(4) == 5
    pool.command = ""
    assert pool.progress(0).at == Beat()
    assert pool.progress(0).beat > 0


def test_what_fails_before_anything_is_sent_is_an_error_of_this_package_and_ends_no_rank(monkeypatch):
    """Callers, ComfyUI's memory manager among them, know one kind of error."""
    with small_pool() as pool:
        pids = list(pool.pids)
        with pytest.raises(ContextParallelError, match=r"echo failed .*TypeError"):
            pool.request(Echo(value=object(), drop=()), timeout=30)
        with pytest.raises(ProtocolError, match="above the limit"):
            pool.request(Echo(value="x" * (MAX_HEADER + 1), drop=()), timeout=30)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(PoolError, match="no room for 256"):
                echo(pool, torch.empty(256 << 20, dtype=torch.uint8))
        with pytest.raises(PoolError, match="copying the result failed"):
            pool.result(request_echo(pool, torch.ones(3)), torch.device("hpu"))
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
        assert (pool.alive, pool.pids) == (True, pids)
        pool.kill()
        with pytest.raises(PoolError, match="closed"):
            pool.trim()
        with pytest.raises(PoolError, match="closed"):
            pool.result([Value(nbytes=4, value=1)], torch.device("cpu"))


def test_shared_memory_of_large_messages_and_results_is_given_back():
    large, small = torch.arange(2 * KEEP_BYTES // 8), torch.ones(3)
    with small_pool() as pool:
        blocks = pool.shared.request, pool.shared.response
        for sent in (large, small, large, large, small):
            assert torch.equal(echo(pool, sent), sent)
            asked, given = (block.size for block in blocks)
            assert given <= KEEP_BYTES  # at once: nobody knows whether another one follows
            assert asked == (large.nbytes if sent is large else KEEP_BYTES)  # large ones tend to come with every call
        echo(pool, large)
        pool.trim()
        assert [block.size for block in blocks] == [KEEP_BYTES] * 2


def test_connections_of_other_users_end_no_rank():
    """gloo aborts a process that cannot accept a connection for want of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * USUAL_LIMIT:
        pytest.skip(f"the hard limit of open files is {hard} here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_LIMIT, hard))
    opened: list[socket.socket] = []
    try:
        with small_pool() as pool:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            rank = psutil.Process(pool.pids[1])
            assert rank.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
            listening = [c.laddr for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert listening
            opened += [socket.create_connection(listening[0]) for _ in range(USUAL_LIMIT + 100)]
            time.sleep(0.5)
            assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
    finally:
        for connection in opened:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_brief_command_leaves_what_the_ranks_did(monkeypatch):
    """Between the start and a load they are asked for their memory, and are shown as starting until they load."""
    with small_pool() as pool:
        assert pool.last_command == "start"
        with monkeypatch.context() as patch:
            patch.setattr(Echo, "brief", True)
            echo(pool, torch.ones(1))
            assert pool.last_command == "start"
        echo(pool, torch.ones(1))
        assert pool.last_command == "echo"


def test_time_in_which_ranks_are_not_told_yet_is_none_of_theirs(monkeypatch):
    """This process may be stopped after it has told the first rank of a command and before it tells the last one."""
    with small_pool() as pool:
        echo(pool, torch.ones(1))
        send = pool.processes[1].send

        def late(frame: Frame) -> None:
            time.sleep(1.5)
            send(frame)

        monkeypatch.setattr(pool.processes[1], "send", late)
        assert echo(pool, torch.ones(1), timeout=1.0) == 1
