"""Weights as bytes: every format comes back as it went in, and a weight that is away says whose it is."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.weights.blocks import blocks_of, sizes_of
from cp_runtime.engine.weights.packing import Packing
from cp_runtime.engine.weights.sharded import ShardedWeights
from cp_runtime.errors import PlanError

CPU = torch.device("cpu")

pytestmark = pytest.mark.bits("the same products, of weights whose bytes came back")


class TwoTensors(torch.Tensor):
    """A weight that wraps others, as quantised ones do."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_, made.scale = data, scale
        return made

    def __init__(self, data, scale):
        super().__init__()

    def __tensor_flatten__(self):
        return ["data_", "scale"], "context"

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        assert context == "context"
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(function, args, kwargs or {}, cls(args[0].data_, args[0].scale))  # as torchao's do
        unwrapped = [a.data_.float() * a.scale if isinstance(a, cls) else a for a in args]
        return function(*unwrapped, **(kwargs or {}))


def weights():
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        torch.randn(()),  # no dimension
        torch.randn(0, 4),
        torch.randn(7, 6).to(torch.float8_e4m3fn),
        torch.randn(4, 6).t(),  # dense, in another order
        torch.randn(4, 6)[:, ::2],  # not dense
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randint(-100, 100, (11,), dtype=torch.int8),
        TwoTensors(torch.randint(-100, 100, (6, 4), dtype=torch.int8), torch.rand(())),
    ]


def same(one, other):
    if isinstance(one, TwoTensors):
        return isinstance(other, TwoTensors) and torch.equal(one.data_, other.data_) and torch.equal(one.scale, other.scale)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())


@pytest.mark.parametrize("size", [13, 100, 4096])
def test_bytes_come_back(size):
    """In parts of any size, taken one by one."""
    packing = Packing(weights())
    run = torch.empty(packing.nbytes, dtype=torch.uint8)
    for begin in range(0, packing.nbytes, size):
        packing.copy_range(weights(), begin, run[begin : begin + size])
    views = packing.views(run)
    assert all(map(same, weights(), views))
    assert views[6].is_contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self, width, experts=0):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.own = nn.Parameter(torch.randn(width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * self.own + sum(expert(x) for expert in self.experts)


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width), Block(width, experts=2), Block(width)])
        self.nested = nn.ModuleList([nn.ModuleList([Block(width), Block(width)]), nn.Sequential(Block(width), nn.SiLU())])
        self.small = nn.ModuleList([nn.LayerNorm(width)])
        self.blocks[2].lin.weight = self.blocks[0].lin.weight  # of two blocks: of none
        self.nested[0][1].experts.append(self.nested[0][1].lin)  # of two places in a block
        self.nested[1][0].experts.append(nn.Linear(width, width))
        self.nested[1][0].experts[0].bias = self.nested[1][0].own  # of two modules in a block

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for block in self.nested:
            for inner in block:
                x = inner(x)
        return self.small[0](self.embed(x))


def sharded(model, **options):
    made = ShardedWeights(model, RankGroup(None), CPU, remedy="Do this.", **options)
    for name in made.blocks:
        made.keep(name)
    return made


def test_blocks_are_the_elements_of_lists():
    blocks = {block.name: block for block in blocks_of(Model())}
    assert list(blocks) == ["blocks.1", "nested.0.0", "nested.0.1", "nested.1.0"]  # what is left of 0 and 2 is not worth a message
    assert "blocks.1.experts.1.weight" in blocks["blocks.1"].slots
    assert len(blocks["nested.0.1"].slots["nested.0.1.lin.weight"]) == 1  # the same module in two places
    assert len(blocks["nested.1.0"].slots["nested.1.0.own"]) == 2


def test_sizes_add_up():
    model = Model()
    sizes = sizes_of(model)
    assert sizes.whole == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.largest == blocks_of(model)[0].nbytes
    assert sizes.per_rank(4) == sizes.rest + 2 * sizes.largest + -(-sizes.blocks // 4)
    assert sizes.per_rank(4, on_host=True) == sizes.rest + 2 * sizes.largest


@torch.no_grad()
def test_a_model_computes_the_same_and_gets_its_weights_back():
    model, x = Model().eval(), torch.randn(2, 96)
    expected = copy.deepcopy(model)(x)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = sharded(model)
    for _ in range(3):
        with weights.call():
            assert torch.equal(model(x), expected)
    weights.free_buffers()
    with weights.call():
        assert torch.equal(model(x), expected)
    weights.restore()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert model.nested[0][1].experts[0].weight is model.nested[0][1].lin.weight
    assert torch.equal(model(x), expected)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_a_call_that_takes_another_way_than_the_last_one():
    """The order of the last call is a guess."""
    model, x = Model().eval(), torch.randn(2, 96)
    plain, weights = copy.deepcopy(model), sharded(model)
    for order in ([0, 1, 2], [2, 1, 0], [1], [1, 1, 2], [0, 1, 2]):
        with weights.call():
            for i in order:
                assert torch.equal(model.blocks[i](x), plain.blocks[i](x))


@torch.no_grad()
def test_after_an_error_the_next_call_is_right():
    model, x = Model().eval(), torch.randn(2, 96)
    expected, weights = copy.deepcopy(model)(x), sharded(model)
    hook = model.nested[0][0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), weights.call():
        model(x)
    hook.remove()
    with weights.call():
        assert torch.equal(model(x), expected)


class Nested(nn.Module):
    """Blocks that run inside of another one."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(96) for _ in range(4))
        self.depth = depth

    def forward(self, x, at=0):
        weight = self.blocks[at].lin.weight if at else None
        del weight
        hook = None
        if at + 1 < self.depth:
            hook = self.blocks[at].lin.register_forward_hook(lambda _, __, out: out + self.forward(x, at + 1))
        x = self.blocks[at](x)
        if hook is not None:
            hook.remove()
        return x


@torch.no_grad()
def test_a_block_inside_of_another_one():
    """The outer one's weights stay while it runs; of three at a time there are none."""
    x = torch.randn(2, 96)
    model = Nested(2).eval()
    expected, weights = copy.deepcopy(model)(x), sharded(model)
    for _ in range(2):
        with weights.call():
            assert torch.equal(model(x), expected)
    model = Nested(3).eval()
    weights = sharded(model)
    with pytest.raises(PlanError, match=r"blocks\.2 runs inside of two other blocks.*Do this\."), weights.call():
        model(x)


@torch.no_grad()
def test_a_block_that_runs_outside_of_a_call_is_refused_by_name():
    """Also after a call, when its weights may still be in a buffer: other ranks would not join."""
    model = Model().eval()
    weights, x = sharded(model), torch.randn(2, 96)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"blocks\.1 runs outside of a call of the model.*Do this\."):
            model.blocks[1](x)
        with weights.call():
            model(x)


@torch.no_grad()
def test_a_weight_that_is_read_outside_of_its_block_is_refused_by_name():
    model = Model().eval()
    model.blocks[1].lin.weight = nn.Parameter(TwoTensors(torch.ones(96, 96, dtype=torch.int8), torch.tensor(0.5)), False)
    weights = sharded(model)
    for name in ("blocks.1.lin.weight", "blocks.1.own"):
        weight = model.get_parameter(name)
        assert (weight.device, weight.dtype) == (CPU, torch.float32)
        with pytest.raises(PlanError, match=f"{name} was read while it is not on this rank.*Do this"):
            weight + 1
    x = torch.randn(2, 96)
    with weights.call():
        model(x)
    weights.remove()
    with pytest.raises(PlanError, match="was read"):
        model(x)


@torch.no_grad()
def test_what_users_do_to_a_model_without_its_weights():
    """It is right or refused by name, before and after calls: no number is lost without a word."""
    model, x = Model().eval(), torch.randn(2, 96)
    weights = sharded(model)
    for _ in range(2):
        for name, weight in model.named_parameters():
            if not any(name.startswith(block) for block in weights.blocks):
                continue
            for use in (copy.deepcopy, pickle.dumps, Tensor.share_memory_, Tensor.numpy, nn.init.zeros_, Tensor.half):
                with pytest.raises(PlanError, match=f"{name} was read"):
                    use(weight)
            with pytest.raises(PlanError, match=f"{name} was read"):
                weight.data = torch.ones(weight.shape)
        block = model.blocks[1]
        for refused in (block.half, partial(block.to, "meta"), lambda: torch.save(model.state_dict(), io.BytesIO())):
            with pytest.raises(PlanError, match="was read"):
                refused()
        with pytest.raises(RuntimeError, match="was read"):
            model.load_state_dict(Model().state_dict())
        expected = Model().eval()(x)
        assert set(model.state_dict()) == set(Model().state_dict())
        model.to(CPU).float().requires_grad_(False)
        with weights.call():
            assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_weight_that_somebody_puts_in_is_refused_and_stays():
    model, x = Model().eval(), torch.randn(2, 96)
    weights = sharded(model)
    with weights.call():
        model(x)
    model.blocks[1].own = own = nn.Parameter(torch.zeros(96))
    weights.free_buffers()
    for _ in range(2):
        with pytest.raises(PlanError, match=r"blocks\.1\.own was replaced.*Do this"), weights.call():
            model(x)
    weights.restore()
    assert model.blocks[1].own is own
    assert torch.equal(model.blocks[1].lin.weight, Model().blocks[1].lin.weight)


@torch.no_grad()
def test_a_block_that_is_kept_again_has_its_new_weights():
    model, x = Model().eval(), torch.randn(2, 96)
    plain, weights = copy.deepcopy(model), sharded(model)
    with weights.call():
        model(x)
    for name in ("blocks.1", "nested.1.0"):  # the last one is in a buffer
        plain.get_submodule(name).lin.weight = nn.Parameter(torch.full((96, 96), 0.1))
        weights.keep(name, {path: plain.get_parameter(path) for path in weights.blocks[name].slots})
        for _ in range(2):
            with weights.call():
                assert torch.equal(model(x), plain(x))


def test_weights_say_whether_they_require_gradients():
    """Else linear layers take another way through torch, and their last bits differ."""
    x = torch.randn(3, 2, 64).transpose(0, 1)
    for requires_grad in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))).eval().requires_grad_(requires_grad)
        model[0][1].bias.requires_grad = False
        with torch.inference_mode():
            expected, weights = model(x), sharded(model)
            with weights.call():
                assert torch.equal(model(x), expected)
        weights.restore()
        assert [parameter.requires_grad for parameter in model.parameters()] == [requires_grad] * 3 + [False]


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_calls_inside_and_outside_of_inference_mode(first):
    model, x = Model().eval(), torch.randn(2, 96)
    model.blocks[1].own = nn.Parameter(TwoTensors(torch.ones(96, dtype=torch.int8), torch.tensor(0.5)), False)
    with torch.inference_mode():
        expected = model(x)
    with first():
        weights = sharded(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode(), weights.call():
            assert torch.equal(model(x), expected)
    with torch.inference_mode():
        weights.restore()
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("order", "version", "alone"),
    [("1", (2, 28, 9), False), ("1", (2, 21, 5), True), ("0", (2, 28, 9), True), (None, (2, 28, 9), True)],
)
def test_weights_travel_alone_where_nccl_keeps_no_order(monkeypatch, order, version, alone):
    """Kernels of two groups that devices start in different orders wait for each other without end."""
    ranks = RankGroup(None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if order is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", order)
    ranks.size, ranks.backend = 2, "xccl"
    assert not ranks.may_overlap
    ranks.backend = "nccl"
    overlaps, ranks.size = ranks.may_overlap, 1
    assert overlaps is not alone
    monkeypatch.setattr(RankGroup, "may_overlap", overlaps)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    shared = ShardedWeights(model, ranks, CPU)
    for name in shared.blocks:
        shared.keep(name)
    under_way = []
    for layer in model:
        layer.register_forward_hook(lambda *_: under_way.append(sum(len(block.pending) for block in shared._held)))
    for _ in range(2):  # the second call fetches ahead
        with shared.call():
            model(torch.randn(2, 64))
    assert (max(under_way) == 0) is alone


STREAMS = """
from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.weights.sharded import ShardedWeights

layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to("cuda")
x = torch.randn(2, 64, device="cuda")
expected = layers(x)
shared = ShardedWeights(layers, RankGroup(None), torch.device("cuda", 0), on_host=True)
for name in shared.blocks:
    shared.keep(name)
for _ in range(2):  # the second call fetches ahead
    with shared.call():
        assert torch.equal(layers(x), expected)
"""


def test_blocks_of_one_rank_wait_for_what_another_stream_copies(run_on_cards):
    """Kept on the host: no collective puts the streams in order. Fake devices report races between them."""
    run_on_cards(STREAMS)
