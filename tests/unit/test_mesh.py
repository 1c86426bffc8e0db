"""Groups of ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cp_runtime.engine.attention.ulysses import HeadExchange
from cp_runtime.engine.mesh import SequenceMesh, form_groups, make_groups, reduced


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
