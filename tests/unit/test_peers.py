"""What a pool says about peer-to-peer transfers between its devices. A table stands in for torch's query of the driver."""

import pytest
import torch
from support.pools import small_pool

from cp_runtime.pool.config import DeviceInventory, RuntimeConfig
from cp_runtime.pool.peers import Connection, check_peers, connections, without_peer_access

LINKS = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:2", "cuda:3"), ("cuda:3", "cuda:2")}
"""Pairs that reach each other: two links between four cards."""


CARDS = DeviceInventory(type="cuda", count=4)


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
    assert check_peers(devices.split(","), Connection(backend="nccl")) is (not pairs)
    assert [record.getMessage().count(" to cuda") for record in caplog.records] == [len(pairs)] * bool(pairs)


def test_what_is_tried(monkeypatch):
    def tried(**inputs):
        return [str(way) for way in connections(RuntimeConfig.resolve(inventory=inputs.pop("inventory", CARDS), **inputs))]

    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert tried() == ["nccl", "nccl with NCCL_P2P_DISABLE=1", "gloo"]
    assert tried(backend="nccl") == ["nccl", "nccl with NCCL_P2P_DISABLE=1"]
    assert tried(backend="gloo") == ["gloo"]
    assert tried(world_size=1) == tried(inventory=DeviceInventory(type="cpu", count=0)) == ["gloo"]
    intel = DeviceInventory(type="xpu", count=2)
    assert (tried(inventory=intel), tried(inventory=intel, backend="xccl")) == (["xccl", "gloo"], ["xccl"])
    assert tried(inventory=DeviceInventory(type="npu", count=2)) == ["gloo"]  # without torch_npu there is nothing but gloo
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert tried() == ["nccl with NCCL_P2P_DISABLE=1", "gloo"]


@pytest.mark.parametrize(("needed", "said"), [(0, False), (1 << 50, True)])
def test_too_small_a_dev_shm_is_named_where_messages_go_through_it(monkeypatch, caplog, needed, said):
    monkeypatch.setattr("cp_runtime.pool.peers.SHM_PER_RANK", needed)
    assert not check_peers(["cuda:0", "cuda:2"], Connection(backend="nccl"))
    assert ("--shm-size=1g" in caplog.text) == said


def test_nothing_is_said_about_cpu_ranks(caplog):
    with small_pool() as pool:
        assert pool.peer_to_peer is None
    assert "peer" not in caplog.text
