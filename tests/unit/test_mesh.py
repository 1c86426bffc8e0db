"""Groups of ranks."""

import gc
import random
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from cp_runtime.engine.attention.ulysses import HeadExchange
from cp_runtime.engine.ranks.mesh import (
    BatchMesh,
    Groups,
    SequenceMesh,
    factors,
    form_groups,
    groups_of_world,
    make_groups,
    reduced,
)


@pytest.mark.parametrize(
    ("groups", "shares", "expected"),
    [
        (2, (), [[0, 1], [2, 3]]),
        (2, (2, 1, 2, 1), [[0, 1], [2, 3]]),
        (2, (2, 2, 1, 1), [[0, 2], [1, 3]]),
        (2, (1, 1, 2, 2), [[0, 2], [1, 3]]),
        (2, (5, 3, 2, 1), [[0, 3], [1, 2]]),
        (4, (4, 1, 1, 1), [[0], [1], [2], [3]]),
        (1, (4, 1, 1, 1), [[0, 1, 2, 3]]),
    ],
)
def test_the_group_with_the_least_share_gets_as_much_as_can_be(groups, shares, expected):
    assert form_groups(4, groups, shares) == expected


def test_heads_follow_shares_and_are_the_same_in_every_chunk():
    mesh = SequenceMesh(None, shares=(3, 1, 2, 2))
    assert (mesh.head_shares(1), mesh.head_shares(2), mesh.head_shares(4)) == ((), (5, 3), (3, 1, 2, 2))
    assert SequenceMesh(None, shares=(2, 1, 1, 2)).head_shares(2) == ()
    first, second = (HeadExchange(SimpleNamespace(size=2, rank=rank), 24, (2, 1)) for rank in range(2))
    assert (first.own_range, second.own_range) == ((0, 16), (16, 24))


def test_equal_shares_are_none():
    assert reduced((3, 3)) == reduced((1,)) == reduced(()) == ()
    assert reduced((6, 2, 4)) == (3, 1, 2)


def on_rank(rank, world, monkeypatch):
    """Be one of some ranks, of which none is there; returns the list of what groups it makes."""
    made = []

    def make_groups(lists, like, timeout):
        made.append(lists)
        return next((tuple(ranks) for ranks in lists if rank in ranks), None)

    monkeypatch.setattr("cp_runtime.engine.ranks.mesh.make_groups", make_groups)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group=range(world): len(group))
    monkeypatch.setattr(dist, "get_rank", lambda group=range(world): group.index(rank))
    monkeypatch.setattr(dist, "get_process_group_ranks", list)
    return made


def go_through(steps, rank, world, shares, monkeypatch):
    """What groups a rank makes in some steps of a pool: (ranks, batch groups, number of the degrees)."""
    made, everyone = on_rank(rank, world, monkeypatch), tuple(range(world))
    mesh = BatchMesh(everyone, shares=shares, groups=Groups(everyone))
    for step in steps:
        if step is None:
            assert mesh.sequence().weights.size == world
            continue
        count, groups, number = step
        some = mesh.first(count)
        assert (some is None) == (rank >= count)
        if some is not None:
            sequence = some.sequence(groups)
            degrees = list(factors(sequence.size))
            # Each group chooses for itself where they differ.
            place = some.index(groups) if mesh.shares else number
            ring, ulysses = degrees[place % len(degrees)]
            axes = sequence.axes(ring, ulysses)
            assert (axes.ring.size, axes.ulysses.size) == (ring, ulysses)
    return made


@pytest.mark.parametrize(
    "shares",
    [
        (1,) * 4,
        (2, 1, 1, 1),
        (1,) * 6,
        (3, 3, 2, 2, 1, 1),
        (1,) * 8,
        (3, 2, 2, 2, 1, 1, 1, 1),
        (2,) * 4 + (1,) * 5,
        (2,) * 6 + (1,) * 6,
    ],
    ids=str,
)
def test_all_ranks_make_the_same_groups_in_the_same_order(shares, monkeypatch):
    """Whatever calls run, and on which ranks. A rank that goes another way would leave all others waiting for it."""
    world, draw = len(shares), random.Random(0)
    divisors = {count: [n for n in range(1, count + 1) if not count % n] for count in (1, world // 2, world)}
    steps = [None, *((n, groups, number) for n in divisors for groups in divisors[n] for number in range(len(divisors[n])))]
    for _ in range(3):
        taken = draw.sample(steps, len(steps))
        logs = [go_through(taken, rank, world, shares, monkeypatch) for rank in range(world)]
        assert all(log == logs[0] for log in logs)
        lists = [tuple(group) for step in logs[0] for group in step]
        assert len(set(lists)) >= len(lists) - 1  # none twice, except that of all ranks, for weights


def test_groups_do_not_keep_their_world_alive():
    """Each world has threads and memory, and a process may make many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = ref(dist.group.WORLD)
        groups_of_world(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert world() is None


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nothing_is_under_way_when_groups_are_made(monkeypatch, backend):
    """ncclCommSplit may hang where something is. gloo does not look, and CPU ranks beside a GPU open no context on it."""
    done = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda *_, **__: (done.append("split") or "a group", None))
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("barrier"))
    monkeypatch.setattr("cp_runtime.engine.ranks.mesh.exchange_of", lambda group: None)
    make_groups([[0, 1], [2, 3]], None, None)
    assert done == ["synchronize"] * (backend == "nccl") + ["split", "barrier"]
