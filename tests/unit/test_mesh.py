"""Groups of ranks."""

import torch
import torch.distributed as dist

from cp_runtime.engine.mesh import make_groups


def test_nothing_is_under_way_when_groups_are_made(monkeypatch):
    """ncclCommSplit may hang where something is."""
    done = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda *_, **__: (done.append("split"), None))
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("barrier"))
    make_groups([[0, 1], [2, 3]], None, None)
    assert done == ["synchronize", "split", "barrier"]
