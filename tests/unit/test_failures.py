"""Which rank is named where several died, which kind of error a rank's error becomes, and what users are told to do."""

import re
import signal
import time
from threading import Event, Lock
from types import SimpleNamespace

import pytest
import torch
from support.reports import failure

from cp_runtime.errors import PoolError, PoolTimeout, RankError, RankOutOfMemory
from cp_runtime.pool.collection import Outcome
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.failures import (
    SHOWN_FRAMES,
    STACK_TIMEOUT,
    connect_advice,
    connect_failure,
    death,
    missed_deadline,
    reported_failure,
)
from cp_runtime.pool.messages import Beat, Memory
from cp_runtime.pool.processes import RankProcess
from cp_runtime.pool.progress import Progress
from cp_runtime.pool.worker_pool import WorkerPool

KILLED, LOST_ITS_PEER = -signal.SIGKILL, 1


def ended(*codes):
    """Ranks that ended so."""
    processes = []
    for number, code in enumerate(codes):
        process = RankProcess.__new__(RankProcess)
        process.log, process.pid, process.error = SimpleNamespace(finish=list, stacks=[]), 100 + number, None
        process._outbox, process._lock, process._ended = SimpleNamespace(close=lambda: None), Lock(), Event()
        process.ended(code)
        processes.append(process)
    return processes


@pytest.mark.parametrize(
    ("codes", "noticed", "named"),
    [
        ((KILLED, LOST_ITS_PEER, LOST_ITS_PEER), 1, 0),
        ((LOST_ITS_PEER, LOST_ITS_PEER, KILLED), 0, 2),
        ((KILLED, KILLED, LOST_ITS_PEER), 1, 1),
        ((LOST_ITS_PEER, LOST_ITS_PEER), 1, 1),
        ((0, LOST_ITS_PEER), 0, 0),
    ],
)
def test_a_rank_that_was_killed_comes_before_one_that_lost_it(codes, noticed, named):
    processes = ended(*codes)
    assert death(frozenset(range(len(codes))), noticed, processes).rank == named


CUDA = DeviceInventory(type="cuda", count=2)


def advice(inventory=CUDA, **inputs):
    return connect_advice(RuntimeConfig.resolve(inventory=inventory, **{"backend": "nccl", **inputs}))


def test_ranks_that_were_to_meet_over_nccl_get_its_remedies(monkeypatch):
    assert "NCCL_P2P_DISABLE=1" in advice()
    assert "“communication library” of CP Config to auto" in advice()
    monkeypatch.setattr("cp_runtime.pool.peers.SHM_PER_RANK", 1 << 50)  # more than any machine has
    assert re.search(r"/dev/shm has \d+ MB free, .* --shm-size=1g or --ipc=host", advice())


def test_others_do_not():
    assert advice(backend="gloo") == advice(backend="auto") == ""
    assert advice(DeviceInventory(type="xpu", count=2), backend="xccl") == (
        "Set “communication library” of CP Config to auto, with which the ranks go on over gloo."
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PoolTimeout("connecting timed out"), "no answer in time"),
        (PoolError("ComfyUI is shutting down"), ""),
        (RankError(rank=0, pid=1, kind="DistBackendError", message="NCCL error\nin line 7"), "DistBackendError: NCCL error"),
        (RankError(rank=0, pid=1, kind="RuntimeError", message="NCCL commSplit failed"), "RuntimeError: NCCL commSplit failed"),
        (RankError(rank=0, pid=1, kind="RuntimeError", message="of this pack"), ""),
        (RankError(rank=0, pid=1, kind="SIGBUS", message="the process was ended"), "SIGBUS: the process was ended"),
        (RankError(rank=0, pid=1, kind="SIGKILL", message="the process was ended"), ""),
        (RankError(rank=0, pid=1, kind="ValueError", message="of this pack"), ""),
        (RankOutOfMemory(rank=0, pid=1, kind="DistBackendError", message="CUDA calloc"), ""),
    ],
)
def test_what_may_be_the_fault_of_the_link(error, reason):
    assert connect_failure(error) == reason


def test_a_failed_start_names_the_remedies_where_communication_failed():
    def message(kind):
        return str(reported_failure(0, 1, failure(kind), {}, advice()))

    assert "NCCL_P2P_DISABLE=1" in message("DistBackendError")
    assert "NCCL_P2P_DISABLE=1" not in message("ImportError")


@pytest.mark.parametrize(
    ("message", "named"),
    [("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True), ("CUDA error: invalid device ordinal", False)],
)
def test_a_gpu_for_one_process_only_is_told_how_to_take_more(message, named):
    error = str(reported_failure(0, 1, failure("AcceleratorError", message), {}))
    assert (f"{message}. The GPU may take one process only" in error and "nvidia-smi -c DEFAULT" in error) == named


def test_a_rank_that_died_in_the_start_names_the_remedies():
    assert "to auto" in str(death({0}, 0, ended(-signal.SIGSEGV), advice()))


@pytest.mark.parametrize(("kind", "traced"), [("MirrorError", False), ("UnsupportedError", False), ("RuntimeError", True)])
def test_what_is_said_to_users_needs_no_traceback(kind, traced):
    reply = failure(kind, "the file is gone. Load another.", trace="Traceback: lines of code")
    text = str(reported_failure(1, 7, reply, {1: reply}))
    assert text.startswith(f"rank 1 (pid 7) failed: {kind}: the file is gone. Load another.")
    assert ("lines of code" in text) == traced


def test_a_start_that_hangs_names_the_remedies():
    error = missed_deadline("connecting", 20, {0: Progress()}, ended(0), advice())
    for words in ("connecting timed out after 20 s", "CP_CONNECT_TIMEOUT", "NCCL_P2P_DISABLE=1", "to auto"):
        assert words in str(error)


HEAD = "Thread 0x1 (most recent call first):"
STACKS = [HEAD, "  in a thread", HEAD, *map("  {}".format, range(40))]


@pytest.mark.parametrize("writes", [True, False])
def test_an_error_shows_where_the_main_thread_of_the_last_rank_is(writes):
    """The first lines: what it calls, and not what has called that. A process that is stopped writes none."""
    processes = ended(0, 0)
    processes[1].log.stacks = STACKS if writes else []
    at = {0: Progress(Beat(modules=5), time.monotonic()), 1: Progress(Beat(modules=3), time.monotonic())}
    began = time.monotonic()
    text = str(missed_deadline("call", 20, at, processes, ""))
    assert time.monotonic() - began < 2 * STACK_TIMEOUT
    shown = "\n".join(map("  {}".format, range(SHOWN_FRAMES)))
    assert ((shown in text), f"  {SHOWN_FRAMES}\n" in text, "in a thread" in text) == (writes, False, False)
    assert ("wrote no stack" in text) != writes


@pytest.mark.parametrize(("command", "named"), [("connecting", True), ("start", False), ("call", False)])
def test_a_pool_names_the_remedies_for_what_they_are_good_for_only(command, named):
    pool = WorkerPool(RuntimeConfig.resolve(inventory=CUDA, backend="nccl"), WorkerSite())
    pool.processes = ended(0, 0)
    with pytest.raises(PoolTimeout) as caught:
        pool._conclude(Outcome(replies={}, late=(0, 1), kill=True), command, 300.0)
    assert ("NCCL_P2P_DISABLE=1" in str(caught.value)) == named


@pytest.mark.parametrize(
    ("kind", "message", "memory"),
    [
        ("OutOfMemoryError", "CUDA out of memory.", True),
        ("AcceleratorError", "CUDA error: out of memory", True),
        ("DistBackendError", "NCCL error, unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes", True),
        ("DistBackendError", "NCCL error, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'", True),
        ("DistBackendError", "NCCL error, unhandled cuda error\nLast error:\nCuda failure 'invalid argument'", False),
        ("AcceleratorError", "CUDA error: device-side assert triggered", False),
        ("RuntimeError", "CUDA error: out of memory", True),
        ("RuntimeError", "NCCL commSplit failed: error\nNCCL Last Error: Failed to CUDA calloc async 608 bytes", True),
        ("RuntimeError", "Failed to initialize NCCL communicator: error\nNCCL Last Error: Cuda failure 2 'out of memory'", True),
        ("RuntimeError", "Failed to initialize NCCL communicator: unhandled system error", False),
        ("RuntimeError", "NPU out of memory. Tried to allocate 6.00 GiB", True),
        ("RuntimeError", "out of memory, says someone else", False),
    ],
)
def test_comfyui_sees_an_error_of_its_device_where_a_rank_has_no_memory_left(kind, message, memory):
    reply = failure(kind, message, memory=Memory(host=2**30, device=2**31))
    error = reported_failure(1, 7, reply, {1: reply})
    assert isinstance(error, torch.OutOfMemoryError) is isinstance(error, RankOutOfMemory) is memory
    assert isinstance(error, RankError)
    assert ("rank 1: host 1.00 GiB, device 2.00 GiB" in str(error)) is memory
