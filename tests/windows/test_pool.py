"""Ranks of Windows: start, messages, death, deadlines, Cancel, and the exchange between them."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.pools import echo, make_pool, small_pool

from cp_runtime.errors import PoolTimeout, RankError
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.worker_pool import CallCancelled

HERE = Path(__file__).parent


def gone(pids, seconds=10.0):
    """Whether all of these processes end within some seconds."""
    return not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=seconds)[1]


def suspended(pool, rank):
    """Stop a rank, so that it misses any deadline."""
    psutil.Process(pool.pids[rank]).suspend()


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_go_there_and_back(ranks):
    pool = make_pool(ranks)
    pool.start()
    for value in (torch.randn(1, 16, 64, 64, dtype=torch.bfloat16), torch.arange(3 << 20), torch.ones(())):
        assert torch.equal(echo(pool, value), value)
    pids = pool.pids
    pool.close()
    assert [process.returncode for process in pool.processes] == [0] * ranks
    assert gone(pids, 0.0)


def test_a_rank_that_is_ended_is_named_and_the_next_pool_starts():
    with small_pool() as pool:
        psutil.Process(pool.pids[1]).kill()
        with pytest.raises(RankError, match=r"rank 1 .*(the process exited with code|did not end)"):
            echo(pool, torch.ones(3))
        assert not pool.alive
        assert gone(pool.pids)
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))


def test_a_rank_that_crashes_is_named_by_what_the_system_says(tmp_path):
    (tmp_path / "crashes.py").write_text("import os\nos._exit(-1073740791)\n")  # as `abort` ends a process
    pool = make_pool(site=WorkerSite(path=(str(tmp_path),), preload=("crashes",)))
    with pytest.raises(RankError, match="the process ended with STATUS_STACK_BUFFER_OVERRUN"):
        pool.start()


def test_a_late_rank_is_named():
    with small_pool() as pool:
        suspended(pool, 1)
        with pytest.raises(PoolTimeout, match=r"echo timed out after 2 s; .*rank 1.* wrote no stack"):
            echo(pool, torch.ones(3), timeout=2.0)
        assert gone(pool.pids)


def test_a_late_rank_shows_its_stack(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CP_STARTUP_TIMEOUT", "20")
        pool = make_pool(site=WorkerSite(path=(str(tmp_path),), preload=("slow",)))
    with pytest.raises(PoolTimeout, match=r"(?s)start timed out after 20 s; .*Its main thread.*slow\.py"):
        pool.start()


def test_cancel_ends_a_wait():
    with small_pool() as pool:
        suspended(pool, 1)
        began = time.monotonic()
        with pytest.raises(CallCancelled):
            echo(pool, torch.ones(3), timeout=60.0, cancelled=lambda: time.monotonic() - began > 0.5)
        assert time.monotonic() - began < 20
        assert gone(pool.pids)


def test_abort_from_another_thread():
    with small_pool() as pool:
        suspended(pool, 0)
        threading.Timer(0.5, pool.abort, args=("the user asked for a restart",)).start()
        with pytest.raises(Exception, match="the user asked for a restart"):
            echo(pool, torch.ones(3), timeout=60.0)
        assert gone(pool.pids)


@pytest.mark.parametrize("moment", ["while its ranks start", "while they wait"])
def test_ranks_end_with_their_owner(moment):
    """However that ends."""
    owner = subprocess.Popen([sys.executable, str(HERE / "owner.py")], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    if moment == "while they wait":
        assert owner.stdout.readline() == "ready\n"
    assert len(pids) == 2
    owner.kill()
    assert gone(pids)
    owner.stdout.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_exchange_through_shared_memory(tmp_path, ranks):
    programs = [
        subprocess.Popen([sys.executable, str(HERE / "exchange.py"), str(rank), str(ranks), str(tmp_path / "store")],
                         stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]  # fmt: skip
    assert [program.communicate(timeout=240)[0].splitlines()[-1] for program in programs] == ["exact"] * ranks


def test_nothing_is_left():
    """No file, and no process."""
    folder = Path(os.environ["TEMP"])
    with small_pool() as pool:
        echo(pool, torch.ones(3))
    assert not list(folder.glob("context-parallel-*"))
    assert not [child for child in psutil.Process().children(recursive=True) if "rank_program" in " ".join(child.cmdline())]
