"""Groups of ranks."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cp_runtime.engine.attention.ulysses import HeadExchange
from cp_runtime.engine.config import SequenceSettings
from cp_runtime.engine.cost import AttentionShape, Rates
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.mesh import BatchMesh, Groups, SequenceMesh, factors, form_groups, make_groups, reduced
from cp_runtime.engine.policy import CallWork, Pool, candidates


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

    monkeypatch.setattr("cp_runtime.engine.mesh.make_groups", make_groups)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group=range(world): len(group))
    monkeypatch.setattr(dist, "get_rank", lambda group=range(world): group.index(rank))
    monkeypatch.setattr(dist, "get_process_group_ranks", list)
    return made


def go_through(steps, rank, world, shares, monkeypatch):
    """What groups a rank makes in some steps of a pool."""
    made, everyone = on_rank(rank, world, monkeypatch), tuple(range(world))
    mesh = BatchMesh(everyone, shares=shares, groups=Groups(everyone))
    for step in steps:
        if step is None:
            assert mesh.sequence().weights.size == world
        elif len(step.ranks) < world:
            team = mesh.team(step.ranks, step.groups, step.ring, step.ulysses)
            assert (team is None) == (rank not in step.ranks)
            if team is not None:
                axes = team.sequence(step.groups).axes(step.ring, step.ulysses)
                assert (axes.ring.size, axes.ulysses.size) == (step.ring, step.ulysses)
        else:
            sequence = mesh.sequence(step.groups)
            degrees = list(factors(sequence.size))
            # Each group chooses for itself where they differ.
            place = mesh.index(step.groups) if mesh.shares else step.ring
            sequence.axes(*degrees[place % len(degrees)])
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
    each = tuple(Rates(latency=1e-5, bandwidth=1e10, flops=1e12 * share, memory=1e11, overlap=0.0) for share in shares)
    ranks = Pool(Measured(each, (), tuple(range(world))), reduced(shares), SequenceSettings())
    work = CallWork(12, True, ((AttentionShape(1, 960, 960, 24, 24, 64, 2), 1),), 1e9, 1, 1)
    splits = [None, *candidates(work, ranks)]
    assert any(1 < len(split.ranks) < world and split.groups > 1 for split in splits[1:])
    for _ in range(3):
        steps = draw.sample(splits, len(splits))
        logs = [go_through(steps, rank, world, shares, monkeypatch) for rank in range(world)]
        assert all(log == logs[0] for log in logs)
        lists = [tuple(group) for step in logs[0] for group in step]
        assert len(set(lists)) >= len(lists) - 1  # none twice, except that of all ranks, for weights


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nothing_is_under_way_when_groups_are_made(monkeypatch, backend):
    """ncclCommSplit may hang where something is. gloo does not look, and CPU ranks beside a GPU open no context on it."""
    done = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda *_, **__: (done.append("split") or "a group", None))
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("barrier"))
    make_groups([[0, 1], [2, 3]], None, None)
    assert done == ["synchronize"] * (backend == "nccl") + ["split", "barrier"]
