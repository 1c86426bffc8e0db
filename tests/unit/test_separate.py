"""Modules whose streams have lengths of their own, entered several times in a call; attention that is found by its name."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cp_runtime.comfy.rank.attention import attention_by_name
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.plan import ModulePlan, ShardingPlan
from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.transforms import ContextParallelInput
from cp_runtime.errors import PlanError

TOKENS = ContextParallelInput(1, 3, streams=("window",))


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class Model(nn.Module):
    """Gives windows of its tokens to its blocks, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks([nn.Identity()])

    def forward(self, x, edges):
        return [self.blocks(x[:, start:stop]) for start, stop in edges]


def plan(attention):
    blocks = {"blocks": ModulePlan(separate=True), "blocks.*": ModulePlan(inputs={"input": TOKENS}, attention=attention)}
    return ShardingPlan(modules=blocks, outputs={})


def first_of_two():
    mesh = SequenceMesh(None)
    mesh.whole = RankGroup(None)
    mesh.whole.rank, mesh.whole.size = 0, 2
    return mesh


def run(attention, edges):
    model = Model()
    installed = InstalledPlan(model, plan(attention))
    with installed.call(first_of_two(), lambda shape: pytest.fail("no attention is shared")) as call:
        return installed.forward(model.forward, torch.zeros(1, 9, 2), edges), call.state


def test_tokens_of_all_windows_count():
    parts, state = run((), [(0, 6), (4, 9)])
    assert [part.shape[1] for part in parts] == [3, 3]
    assert state.lengths == {}
    assert state.tokens() == {"window": (11, 6)}


def test_attention_missed_in_a_window_is_an_error():
    with pytest.raises(PlanError, match="no attention was shared"):
        run(("window",), [(0, 6)])


@pytest.mark.parametrize(("name", "called"), [("attend", lambda m: m.attend("q")), ("choose()", lambda m: m.choose("cpu")("q"))])
def test_attention_is_replaced_by_name_and_where_a_function_chooses_it(name, called, monkeypatch):
    def attend(q):
        return f"stock {q}"

    owner = SimpleNamespace(attend=attend, choose=lambda device: {"cpu": attend}[device])
    monkeypatch.setitem(sys.modules, "owner_of_attention", owner)
    with attention_by_name([f"owner_of_attention.{name}"], lambda func, q: f"shared for {func(q)}"):
        assert called(owner) == "shared for stock q"
    assert called(owner) == "stock q"
