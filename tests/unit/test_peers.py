"""What a pool says about peer-to-peer transfers between its devices. A table stands in for torch's query of the driver."""

import pytest
import torch
from support.pools import small_pool

from cp_runtime.pool.config import DeviceInventory, RuntimeConfig
from cp_runtime.pool.peers import without_peer_access
from cp_runtime.pool.site import WorkerSite
from cp_runtime.pool.worker_pool import WorkerPool

LINKS = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:2", "cuda:3"), ("cuda:3", "cuda:2")}
"""Pairs that reach each other: two links between four cards."""


@pytest.fixture(autouse=True)
def links(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in LINKS)


@pytest.mark.parametrize(
    ("devices", "pairs"),
    [
        ("cuda:0,cuda:1", []),
        ("cuda:3,cuda:2", []),
        ("cuda:0,cuda:1,cuda:2", ["cuda:0 to cuda:2", "cuda:1 to cuda:2", "cuda:2 to cuda:0", "cuda:2 to cuda:1"]),
    ],
)
def test_cards_that_do_not_reach_each_other_are_named(devices, pairs, caplog):
    assert without_peer_access(devices.split(",")) == pairs
    pool = WorkerPool(RuntimeConfig.resolve(inventory=DeviceInventory(type="cuda", count=4), devices=devices), WorkerSite())
    assert pool.peer_to_peer is None
    pool._look_at_peers()
    assert pool.peer_to_peer is (not pairs)
    assert [record.getMessage().count(" to cuda") for record in caplog.records] == [len(pairs)] * bool(pairs)
    pool.kill()


def test_nothing_is_said_about_cpu_ranks(caplog):
    with small_pool() as pool:
        assert pool.peer_to_peer is None
    assert "peer" not in caplog.text
