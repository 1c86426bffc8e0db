"""How ranks come to communicate on a machine whose GPUs do not over NCCL, with fake CUDA devices and gloo under NCCL's name."""

import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import stand_in
from support.pools import echo, make_pool, small_pool
from support.stand_in import groups

from cp_runtime.controller.controller import Controller
from cp_runtime.controller.placement import Shortages
from cp_runtime.controller.workers import Workers
from cp_runtime.errors import RankError
from cp_runtime.pool import peers, worker_pool
from cp_runtime.pool.config import WorkerSite

DETECTION = Path(stand_in.__file__).parents[1] / "detection"


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs, whose link the test breaks."""
    for name, value in {**stand_in.environment(stand_in.Cards(count=2)), "PYTHONPATH": str(DETECTION)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(peers, "_fallbacks", {})
    return lambda link: monkeypatch.setenv(stand_in.LINK, link)


@pytest.fixture
def far_apart(machine, monkeypatch):
    """Cards that do not reach each other's memory."""
    machine(groups.LATE)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)


@contextmanager
def started(**settings):
    with small_pool(on="cuda", **settings) as pool:
        assert torch.equal(echo(pool, torch.arange(5)), torch.arange(5))
        yield pool


def test_broken_peer_to_peer_transfers_are_done_without(machine, monkeypatch, caplog):
    """They go through /dev/shm then, of which containers have little."""
    machine("garble p2p")
    monkeypatch.setattr(peers, "SHM_PER_RANK", 1 << 50)  # more than any machine has
    with started(backend="nccl") as pool:
        assert (pool.backend, pool.peer_to_peer, pool.chosen) == ("nccl", False, "")  # it was asked for
        assert pool.fallback.reason.startswith(
            "ranks did not connect over nccl (DistBackendError: what ranks sent each other did not arrive"
        )
    assert f"{pool.fallback.reason}; trying nccl with NCCL_P2P_DISABLE=1. /dev/shm has " in caplog.text
    assert "no peer-to-peer transfers with NCCL_P2P_DISABLE=1" in caplog.text
    assert caplog.text.count("--shm-size=1g or --ipc=host") == 2
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_ranks_that_nccl_does_not_bring_together_use_gloo_and_so_do_the_next_ones(machine, monkeypatch, caplog):
    machine("hang")
    monkeypatch.setenv("CP_CONNECT_TIMEOUT", "2")
    with started() as pool:
        assert (pool.backend, pool.peer_to_peer) == ("gloo", None)
        why = pool.fallback.reason
        assert why == "ranks did not connect over nccl with NCCL_P2P_DISABLE=1 (no answer in time)"
    caplog.clear()
    with started() as pool:
        assert (pool.backend, pool.fallback.reason) == ("gloo", why)
    assert "trying" not in caplog.text


def test_a_restart_tries_again_what_was_given_up(machine, monkeypatch):
    """It connects slowly now, which is no fault: the first messages have a limit of their own."""
    machine("garble")
    controller, config = Controller(WorkerSite, lambda devices: None), make_pool(on="cuda").config
    workers = controller.workers = Workers(config, WorkerSite(), controller.journal.changed.set, Shortages(), controller.times)
    workers.pool.start()
    assert workers.pool.backend == "gloo"
    machine("slow")
    monkeypatch.setattr(worker_pool, "PROBE_TIMEOUT", 2.5)
    assert controller.restart().result(60)
    pool = controller.workers.pool
    try:
        assert (pool.backend, pool.peer_to_peer, pool.fallback.reason) == ("nccl", True, "")
    finally:
        controller.close()


def test_ranks_share_memory_where_that_is_faster_than_nccl_through_the_host(far_apart, caplog):
    caplog.set_level("INFO")
    with started() as pool:
        assert (pool.backend, pool.peer_to_peer, pool.fallback.reason) == ("gloo", False, "")
        assert re.fullmatch(r"exchanges through shared memory are \d+\.\d × as fast as over nccl", pool.chosen)
        assert {pool.chosen} <= {record.getMessage() for record in caplog.records}


@pytest.mark.soak
def test_nccl_stays_where_ranks_cannot_share_memory(far_apart, caplog):
    """As much as an exchange takes: a limit of a container, or here one of files."""
    pool = make_pool(on="cuda")

    def limit() -> bool:
        for process in pool.processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
        return False

    pool.start(limit)
    try:
        assert (pool.backend, pool.peer_to_peer, pool.chosen, pool.fallback.reason) == ("nccl", False, "", "")
    finally:
        pool.kill()
    told = r"ranks did not exchange through shared memory \(DistBackendError: messages through shared memory: .*File too large"
    assert len(re.findall(told, caplog.text)) == 1


def test_nccl_comes_back_where_shared_memory_fails_after_it_was_faster(far_apart, caplog):
    pool = make_pool(on="cuda")

    def kill() -> bool:
        if pool.chosen:
            pool.processes[1].kill()
        return False

    pool.start(kill)
    try:
        assert (pool.backend, pool.chosen, pool.fallback.reason) == ("nccl", "", "")
    finally:
        pool.kill()
    assert "ranks did not exchange through shared memory (" in caplog.text


def test_nccl_that_was_asked_for_is_not_replaced(machine, caplog):
    machine("fail")
    told = r"(?s)unhandled system error.*NCCL_P2P_DISABLE=1, too.*“communication library” of CP Config to auto"
    with pytest.raises(RankError, match=told), started(backend="nccl"):
        pass
    assert caplog.text.count("; trying ") == 1


def test_a_rank_that_is_killed_while_it_connects_is_no_reason_to_communicate_otherwise(machine, caplog):
    machine("hang")
    pool = make_pool(on="cuda")

    def kill() -> bool:
        if pool.stage == worker_pool.CONNECTING:
            pool.processes[1].kill()
        return False

    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL"):
        pool.start(kill)
    assert "; trying " not in caplog.text
    assert not pool.alive
