"""Blocks that are compiled, in one process: which ones, what happens where the compiler cannot, and what is told to it."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import nn

from cp_runtime.comfy.ui.options import compile_settings
from cp_runtime.compat import on_compilation
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
from cp_runtime.engine.plan import ModulePlan, ShardingPlan
from cp_runtime.errors import CompileError, UnsupportedError

EAGER = CompileSettings(backend="eager")
NO_PLAN = ShardingPlan(modules={}, outputs={})


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x += self.linear(x)
        return x


class Bad(Good):
    """The compiler stops in the middle, where `x` has been changed already."""

    def forward(self, x):
        x += self.linear(x)
        torch._dynamo.graph_break()
        x += 1.0
        return x


class Model(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.out = nn.Sequential(nn.Linear(64, 64))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def x(width=64):
    return torch.linspace(-1.0, 1.0, 5 * width).reshape(1, 5, width)


def test_a_block_that_the_compiler_cannot_take_runs_as_it_is_and_once():
    model = Model(Good, Bad, Bad).eval()
    expected, told = model(x()), []
    blocks = CompiledBlocks(model, NO_PLAN, EAGER)
    blocks.failed = told.append
    assert blocks.kinds == {"Good": 1, "Bad": 2}  # the linear layer behind them is no block
    torch.testing.assert_close(model(x()), expected)
    assert blocks.kinds == {"Good": 1}
    assert list(blocks.left) == ["Bad"]
    assert {error.block for error in told} == {"Bad"}
    assert "graph_break" in str(told[0])
    assert "if a call cannot be split" in str(told[0])
    blocks.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(model(x()), expected)


def test_or_the_call_ends_with_that_every_time():
    model = Model(Bad).eval()
    blocks = CompiledBlocks(model, NO_PLAN, EAGER)

    def fail(error):
        raise error

    blocks.failed = fail
    for _ in range(2):
        with pytest.raises(CompileError, match="cannot compile Bad"):
            model(x())


def test_arguments_that_no_block_can_take_are_not_the_fault_of_the_compiler():
    model = Model(Good).eval()
    expected = model(x())
    blocks = CompiledBlocks(model, NO_PLAN, EAGER)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(x(width=32))
    assert not blocks.left
    torch.testing.assert_close(model(x()), expected)


def test_a_block_inside_of_which_a_plan_splits_stays_as_it_is():
    plan = ShardingPlan(modules={"blocks.0.linear": ModulePlan()}, outputs={})
    blocks = CompiledBlocks(Model(Good, Bad), plan, EAGER)
    assert blocks.kinds == {"Bad": 1}
    assert blocks.left == {"Good": "the plan splits or gathers tokens inside of it"}


def test_a_process_tells_when_it_compiles():
    told = []
    on_compilation(told.append)
    model = Model(Good).eval()
    blocks = CompiledBlocks(model, NO_PLAN, CompileSettings(backend="aot_eager"))
    model(x())
    assert told == [1, 0]
    model(x())
    assert told == [1, 0]
    blocks.remove()


class Quantised(nn.Linear):
    """Quantises its input, as layers of ComfyUI do on a device that multiplies in fp8."""

    def __init__(self):
        super().__init__(64, 64)
        self.weight = nn.Parameter(QuantizedTensor.from_float(self.weight.detach(), "TensorCoreFP8Layout"), requires_grad=False)

    def forward(self, x):
        quantised = QuantizedTensor.from_float(x.reshape(-1, 64), "TensorCoreFP8Layout")
        dtype = quantised.params.orig_dtype  # which no compiler knows of a tensor that is made inside the graph
        product = quantised.dequantize() @ self.weight.dequantize().T
        return (product.to(dtype) + self.bias).reshape(x.shape)


class WithQuantised(Good):
    def __init__(self):
        super().__init__()
        self.first, self.second = Quantised(), Quantised()

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def test_quantised_layers_of_a_compiled_block_run_as_they_are():
    """One graph for two blocks: each has its own layers. On an H200 such a block was refused."""
    model = Model(WithQuantised, WithQuantised).eval()
    expected, wider = model(x()), model(torch.cat([x(), x()], 1))
    blocks = CompiledBlocks(model, NO_PLAN, CompileSettings(backend="aot_eager"))
    torch.testing.assert_close(model(x()), expected)
    torch.testing.assert_close(model(torch.cat([x(), x()], 1)), wider)
    assert (blocks.kinds, blocks.left) == ({"WithQuantised": 2}, {})
    blocks.remove()
    assert not any("forward" in vars(module) for module in model.modules())


ASKED = {"backend": "inductor", "options": None, "mode": None, "fullgraph": False, "dynamic": None}


def test_what_nodes_ask_for_crosses_to_the_ranks():
    guard = {"guard_filter_fn": lambda entries: entries}
    assert compile_settings({**ASKED, "options": guard}) == CompileSettings()
    asked = {**ASKED, "options": {"max_autotune": True, "triton.cudagraphs": False}, "dynamic": False}
    settings = compile_settings(asked)
    assert settings == CompileSettings(options=(("max_autotune", True),), dynamic=False)
    assert settings.arguments == {"backend": "inductor", "dynamic": False, "fullgraph": True, "options": {"max_autotune": True}}


REFUSED = {
    "backend": ({"backend": "tensorrt"}, "backend 'tensorrt'; they have inductor"),
    "cudagraphs": ({"backend": "cudagraphs"}, "backend cudagraphs records"),
    "mode": ({"mode": "reduce-overhead"}, "mode reduce-overhead records"),
    "autotune": ({"mode": "max-autotune"}, "max-autotune-no-cudagraphs"),
    "unknown mode": ({"mode": "fast"}, "mode 'fast'"),
    "dynamic": ({"dynamic": "yes"}, "dynamic is 'yes'"),
    "option": ({"options": {"cpp.cxx": "sh"}}, "option cpp.cxx='sh'"),
    "value": ({"options": {"max_autotune": "yes"}}, "max_autotune='yes'"),
    "graphs": ({"options": {"triton.cudagraphs": True}}, "option triton.cudagraphs records"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_ranks_do_not_do_is_refused_by_name(case):
    change, words = REFUSED[case]
    with pytest.raises(UnsupportedError, match=words.replace("(", "\\(")):
        compile_settings({**ASKED, **change})
