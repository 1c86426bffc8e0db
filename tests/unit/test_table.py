"""Plans in diffusers' form become plans that name streams."""

import pytest
from torch import nn

from cp_runtime import ContextParallelInput, ContextParallelOutput, ModulePlan
from cp_runtime.diffusers.table import plan_from_table
from cp_runtime.errors import PlanError

HIDDEN = ContextParallelInput(1, 3)
OUT = ContextParallelOutput(1, 3)


class SD3Transformer2DModel(nn.ModuleDict):
    """Has the name of a class whose joint order is known."""


def table(**entries):
    model = SD3Transformer2DModel({name: nn.Identity() for name in entries if name != "root"})
    return plan_from_table(model, {"" if path == "root" else path: entry for path, entry in entries.items()})


def test_every_argument_is_a_stream_in_the_order_of_the_plan():
    plan = table(root={"hidden_states": HIDDEN, "encoder_hidden_states": HIDDEN, "ids": ContextParallelInput(0, 2)}, proj_out=OUT)
    assert plan.modules[""].inputs["ids"].streams == ("ids",)
    joint = ("hidden_states", "encoder_hidden_states")
    assert plan.attention == [(joint, joint), *(((name,), (name,)) for name in joint)]
    (output,) = plan.outputs["proj_out"]
    assert output.stream == "hidden_states"


def test_a_class_of_ones_own_says_in_which_order_it_joins_its_streams():
    model, tokens = nn.ModuleDict({"attention": nn.Identity()}), {"": {"x": HIDDEN, "text": HIDDEN}}
    with pytest.raises(PlanError, match=r"splits x and text.*ModuleDict.*ModulePlan\(attention=\('x', 'text'\)\)"):
        plan_from_table(model, tokens)
    plan = plan_from_table(model, {**tokens, "attention": ModulePlan(attention=("text", "x"))})
    assert plan.attention == []  # attention elsewhere is refused


def test_one_stream_needs_no_names():
    plan = table(block={"x": HIDDEN}, out=[None, OUT])
    assert plan.attention == [(("x",), ("x",))]
    assert plan.outputs["out"][0] is None
    assert plan.outputs["out"][1].stream == "x"


def test_a_module_that_splits_and_gathers_has_streams_of_its_own():
    model = nn.ModuleDict({"a": nn.ModuleDict({"out": nn.Identity()}), "b": nn.Identity()})
    plan = plan_from_table(model, {"a": {"x": HIDDEN}, "b": {"x": HIDDEN}, "*": OUT})
    assert (plan.modules["a"].separate, plan.modules["b"].separate) == (True, True)
    plan = plan_from_table(model, {"a": {"x": HIDDEN}, "b": {"x": HIDDEN}, "a.out": OUT})
    assert (plan.modules["a"].separate, plan.modules["b"].separate) == (False, False)


def test_outputs_split_by_index_and_lists_by_item():
    plan = table(
        rope={0: ContextParallelInput(0, 2, split_output=True)}, block={"x": [HIDDEN, HIDDEN]}, named=ModulePlan(attention=())
    )
    assert plan.modules["rope"].outputs[0].streams is None
    assert [t.streams for t in plan.modules["block"].inputs["x"].transforms] == [("x[0]",), ("x[1]",)]
    assert plan.modules["named"].attention == ()
    assert plan.modules["block"].attention is None


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": {"x": HIDDEN, "y": HIDDEN}, "out": OUT}, r"'out': which of x, y is gathered"),
        ({"out": OUT}, "no streams"),
        ({"a": {"x": 3}}, r"'a'\['x'\]: got int; allowed: ContextParallelInput"),
        ({"a": {0: HIDDEN}}, r"'a'\[0\]: split_output=False"),
        ({"a": {"x": ContextParallelInput(1, 3, True)}}, r"'a'\['x'\]: split_output=True"),
        ({"a": {"x": HIDDEN}, "out": 3}, "'out': got int; allowed: ContextParallelOutput"),
        ({"a": {"x": HIDDEN}, "out": ContextParallelOutput(1, 3, stream="y")}, "which of x is gathered"),
    ],
)
def test_what_is_unclear_is_refused(entries, words):
    with pytest.raises(PlanError, match=words):
        table(**entries)
