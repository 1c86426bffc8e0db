"""What an installed plan keeps from call to call, and for how long."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from cp_runtime.engine.call import RunningCall
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.plan import ModulePlan, ShardingPlan
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.profiling import CallTraces
from cp_runtime.engine.state import CallState
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput
from cp_runtime.errors import ConfigError, PlanError
from cp_runtime.families.hidream_o1 import HIDREAM_O1
from cp_runtime.nested import tensors

REFERENCES = HIDREAM_O1.modules[""]


class Model(nn.Module):
    def forward(self, x, **kwargs):
        return kwargs["ref_pixel_values"]


def installed_plan():
    return InstalledPlan(Model(), ShardingPlan(modules={"": REFERENCES}, outputs={}))


def run(installed, pixels):
    with installed.call(SequenceMesh(None), lambda shape: pytest.fail("no attention is shared")):
        return installed.forward(installed.model.forward, torch.zeros(1), ref_pixel_values=pixels)


def test_equal_reference_images_are_the_same_object_in_every_call_of_a_model():
    one, other = installed_plan(), installed_plan()
    first = run(one, torch.ones(3))
    assert run(one, torch.ones(3)) is first
    assert run(one, torch.zeros(3)) is not first
    assert run(other, torch.ones(3)) is not first


@pytest.mark.parametrize("how", ["removed", "dropped with its model"])
def test_reference_images_go_with_the_plan(how):
    installed = installed_plan()
    image = weakref.ref(run(installed, torch.ones(3)))
    gc.collect()
    assert image() is not None
    if how == "removed":
        installed.remove()
    else:
        del installed
        gc.collect()
    assert image() is None


def test_calls_of_the_same_lengths_share_their_layouts():
    first, second = CallState(0, 2), CallState(1, 2)
    for state in (first, second):
        state.define("img", 9)
    assert first.layout(("img",)) is second.layout(("img",))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_made_of_a_side_input_follows_it_when_it_is_changed_in_place(mode):
    """Streams of which a rank's tokens do not lie side by side are copied, and so is what is made of a pair."""
    state, positions = CallState(0, 2), ContextParallelInput(1, streams=("txt", "img"), side=True)
    state.define("txt", 2)
    state.define("img", 4)
    with mode():
        value = torch.zeros(1, 6)
        pair = (value, value.clone())
        assert positions(state, value, "").sum() == state.once("pair", pair, lambda: sum(pair).sum().item()) == 0
        value += 1
        assert positions(state, value, "").sum() == 3
        assert state.once("pair", pair, lambda: sum(pair).sum().item()) == 6


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(tensor.numel() for tensor in tensors(out)), 0)
        return out


def test_causal_attention_over_all_tokens_in_order_takes_no_mask():
    tokens = 300
    call = RunningCall(ShardingPlan(modules={}, outputs={}), "Model", SequenceMesh(None), lambda shape: ContextParallelConfig())
    call.state.define("x", tokens)
    q, k, v = torch.randn(3, 1, tokens, 2, 8)
    with Largest() as largest:
        out = call.attend(q, k, v, causal=True, streams=(("x",), ("x",)))
    assert largest.numbers < tokens * tokens
    expected = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-6)


def test_padding_of_shorter_items_is_hidden_whatever_mask_a_module_gives():
    """Its mask hides the padding on this rank, if there is any: ranks would not agree about it."""
    call = RunningCall(ShardingPlan(modules={}, outputs={}), "Model", SequenceMesh(None), lambda shape: ContextParallelConfig())
    call.state.define("x", 5)
    q, k, v = torch.randn(3, 2, 5, 2, 8)
    padding = torch.zeros(2, 1, 1, 5).masked_fill_(torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()[:, None, None], -1e30)
    call.state.padding["x",] = padding
    call.enter_scope([(("x",), ("x",))])
    expected = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=padding).transpose(1, 2)
    for mask in (None, torch.zeros(2, 1, 1, 5)):
        assert torch.allclose(call.attend(q, k, v, mask=mask), expected, atol=1e-6)


class Boxed:
    """Tokens that are no tensor."""

    tokens = 1


class Boxing(nn.Module):
    def forward(self, x):
        return Boxed()


def test_an_output_that_is_no_tensor_is_for_transforms_that_know_it():
    def run(outputs=None, gathered=None):
        model = nn.ModuleList([Boxing()])
        installed = InstalledPlan(
            model, ShardingPlan(modules={"0": ModulePlan(outputs=outputs or {})}, outputs={"0": gathered} if gathered else {})
        )
        with installed.call(SequenceMesh(None), lambda shape: None):
            return model[0](1)

    assert run({0: lambda state, value, where: value.tokens + 1}) == 2
    for plans in ({"outputs": {0: ContextParallelInput(1)}}, {"gathered": ContextParallelOutput(1, stream="x")}):
        with pytest.raises(PlanError, match="0: expected a tensor or a tuple of tensors, got Boxed"):
            run(**plans)


def test_one_call_at_a_time():
    installed = installed_plan()
    with (
        installed.call(SequenceMesh(None), lambda shape: None),
        pytest.raises(PlanError, match="running already"),
        installed.call(SequenceMesh(None), lambda shape: None),
    ):
        pass
    assert installed.current is None


def test_a_folder_for_traces_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CP_PROFILE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"CP_PROFILE: .* Got .*file.*; allowed: a folder"):
        CallTraces(0)


class Branches(nn.Module):
    """Blocks that a model calls by two methods, and not by their forward."""

    def left(self, x):
        return x + 1

    def right(self, y):
        return y * 2


def test_a_plan_of_methods_gets_their_arguments_and_runs_the_hooks_of_the_module():
    """torch runs hooks, as of sharded weights, around a forward only. Without a call, or a plan, methods are as they were."""
    model, seen = nn.ModuleList([Branches()]), []
    (block,) = model
    block.register_forward_pre_hook(lambda *_: seen.append("gathered"))
    noted = {name: lambda state, value, where, name=name: (seen.append(name), value + 10)[1] for name in "xy"}
    plans = {"*:left": ModulePlan(inputs={"x": noted["x"]}), "*:right": ModulePlan(inputs={"y": noted["y"]})}
    installed = InstalledPlan(model, ShardingPlan(modules=plans, outputs={}))
    with installed.call(SequenceMesh(None), lambda shape: pytest.fail("no attention is shared")):
        assert (block.left(1), block.right(y=1)) == (12, 22)
    assert seen == ["x", "gathered", "y", "gathered"]
    assert (block.left(1), block.right(1)) == (2, 2)
    installed.remove()
    assert not {"left", "right", "forward"} & vars(block).keys()
    with pytest.raises(PlanError, match="has no method 'middle'"):
        InstalledPlan(model, ShardingPlan(modules={"*:middle": ModulePlan()}, outputs={}))


def test_a_plan_of_a_method_that_only_says_attention_is_about_the_method():
    model = nn.ModuleList([Branches()])
    plan = ShardingPlan(modules={"*:left": ModulePlan(attention=())}, outputs={}, attention_rule=lambda module: None)
    installed = InstalledPlan(model, plan)
    assert "left" in vars(model[0])
    installed.remove()
    assert "left" not in vars(model[0])


def test_a_copy_of_a_part_of_a_model_is_as_without_a_plan():
    """It has the hooks of what it was copied from."""
    model = nn.Sequential(nn.Identity())
    plan = ShardingPlan(modules={"0": ModulePlan(attention=())}, outputs={}, attention_rule=lambda module: None)
    installed = InstalledPlan(model, plan)
    assert copy.deepcopy(model[0])(1) == model(1) == 1
    installed.remove()


def test_an_output_with_other_streams_than_the_plan_says():
    call = RunningCall(ShardingPlan(modules={}, outputs={}), "Model", SequenceMesh(None), lambda shape: ContextParallelConfig())
    call.state.define("img", 6)
    call.state.define("txt", 2)
    output = ContextParallelOutput(1, 3, stream="img", within=("txt", "img"))
    with pytest.raises(
        PlanError, match=r"head: dimension 1 of the output \(1, 9, 4\) is not this rank's 2 \+ 6 tokens of txt and img"
    ):
        call.whole_output("head", output, torch.zeros(1, 9, 4))
    assert call.whole_output("head", output, torch.zeros(1, 8, 4)).shape == (1, 8, 4)
