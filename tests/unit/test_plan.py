import pytest
import torch
from torch import nn

from cp_runtime.engine.plan import ModulePlan, argument_positions, find_modules
from cp_runtime.engine.ranks.sharding import Split
from cp_runtime.engine.state import CallState
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput, TokenRanges
from cp_runtime.errors import PlanError
from cp_runtime.families.family import FamilyPlan
from cp_runtime.families.wan import Repeated


def states(world=2, **lengths):
    made = []
    for rank in range(world):
        state = CallState(rank, world)
        state.lengths.update(lengths)
        made.append(state)
    return made


def test_input_defines_the_stream_and_is_idempotent():
    x = torch.randn(2, 5, 3)
    transform = ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",))
    for state, expected in zip(states(), (x[:, :3], x[:, 3:]), strict=True):
        local = transform(state, x, "x")
        assert torch.equal(local, expected)
        assert transform(state, local, "x") is local


def test_side_input_splits_every_stream_once_per_call():
    pe = torch.arange(7.0).view(1, 1, 7)
    transform = ContextParallelInput(split_dim=-1, streams=("txt", "img"), side=True)
    first, second = states(txt=3, img=4)
    assert transform(first, pe, "pe").flatten().tolist() == [0, 1, 3, 4]
    assert transform(second, pe, "pe").flatten().tolist() == [2, 5, 6]
    assert transform(first, pe, "pe") is transform(first, pe, "pe")
    assert transform(first, (pe, None), "pe")[1] is None


def test_side_input_broadcast_over_tokens_passes():
    one = torch.zeros(1, 1, 8)
    (state, _) = states(img=4)
    assert ContextParallelInput(split_dim=1, streams=("img",), side=True)(state, one, "e") is one


def test_wrong_length_dims_or_order_raise():
    (state, _) = states(img=4)
    with pytest.raises(PlanError, match=r"4 tokens.*2"):
        ContextParallelInput(split_dim=1, streams=("img",), side=True)(state, torch.zeros(1, 3), "block(pe)")
    with pytest.raises(PlanError, match="expected 3 dimensions"):
        ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",))(state, torch.zeros(1, 4), "x")
    with pytest.raises(PlanError, match="'txt' is used before"):
        ContextParallelInput(split_dim=1, streams=("txt", "img"), side=True)(state, torch.zeros(1, 9), "pe")


@pytest.mark.parametrize(("index", "expected"), [(0, (0, 0, 0)), (5, (4, 1, 0)), (10, (4, 3, 3)), (None, (None,) * 3)])
def test_token_index(index, expected):
    assert tuple(TokenRanges(streams=("img",))(s, index, "i") for s in states(3, img=10)) == expected


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("boundary", [1, 4, 6, 9])
def test_token_ranges_select_the_same_tokens(world, boundary):
    """Marking tokens by local ranges on every rank marks the tokens that the absolute ranges mark."""
    ranges = [(0, boundary, 0), (boundary, 10, 1)]
    marked = []
    for state in states(world, txt=3, img=10):
        start, stop = state.layout(("img",)).window(state.rank)
        mark = torch.full((stop - start,), -1)
        for a, b, value in TokenRanges(streams=("img",))(state, ranges, "r"):
            mark[a:b] = value
        marked.append(mark)
        # the same ranges in a joint tensor whose text part is local: the first one starts at 0 and covers the text
        shift = state.layout(("txt",)).local_lengths[state.rank]
        joint = [(0 if a == 0 else a + shift, b + shift, value) for a, b, value in ranges]
        both = torch.full((shift + stop - start,), -1)
        for a, b, value in TokenRanges(streams=("img",), after="txt")(state, joint, "r"):
            both[a:b] = value
        assert both.tolist() == [0] * shift + mark.tolist()
    assert torch.cat(marked).tolist() == [0] * boundary + [1] * (10 - boundary)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_joint_ranges_select_the_same_tokens_and_their_values(world):
    """A range has one value for all of its tokens, or a tensor with a value per token, of which a rank takes its own."""
    rows = torch.arange(100, 108)
    ranges = [(0, 3, 7), (3, 11, rows), (11, None, 9)]
    whole = torch.cat([torch.full((3,), 7), rows, torch.full((2,), 9)])
    for state in states(world, txt=3, img=8, tail=2):
        marked = torch.full((state.layout(("txt", "img", "tail")).local_lengths[state.rank],), -1)
        for a, b, value in TokenRanges(streams=("txt", "img", "tail"))(state, ranges, "r"):
            marked[a:b] = value
        assert torch.equal(marked, state.layout(("txt", "img", "tail")).take_local(whole, state.rank, 0))
    a, b, own = TokenRanges(streams=("txt", "img", "tail"))(state, (3, 11, rows), "r")
    assert torch.equal(own, state.layout(("img",)).take_local(rows, state.rank, 0))
    assert b - a == len(own)


def repeat(value, tokens):
    """What Wan's blocks do with a value per frame."""
    frames = value.shape[1]
    if frames in (1, tokens):
        return value
    return torch.repeat_interleave(value, tokens // frames if tokens % frames == 0 else tokens // frames + 1, dim=1)[:, :tokens]


@pytest.mark.parametrize(("frames", "tokens"), [(3, 12), (3, 13), (4, 10), (3, 6)])
@pytest.mark.parametrize("inside", [False, True])
def test_values_per_frame_are_repeated_as_wan_does(frames, tokens, inside):
    """Passed on as they are where repeating them over the local tokens is right, else a value per local token."""
    value = torch.randn(1, frames, 6, 2)
    inside = inside and tokens % frames == 0
    for state in states(3):
        state.define("v", tokens, Split(frames if inside else 1))
        local = Repeated(streams=("v",), ndim=4)(state, value, "e")
        layout = state.layout(("v",))
        expected = layout.take_local(repeat(value, tokens), state.rank, 1)
        assert torch.equal(repeat(local, layout.local_lengths[state.rank]), expected)
        assert not (inside and tokens > 2 * frames * 3) or local is value
    one = torch.randn(1, 1, 6, 2)
    assert Repeated(streams=("v",), ndim=4)(states(v=4)[0], one, "e") is one


class Block(nn.Module):
    def forward(self, x, pe=None):
        return x


def plan(**modules):
    return FamilyPlan(family="Test", model_class="m.M", modules=modules, outputs={"1": ContextParallelOutput(gather_dim=1)})


def test_a_plan_says_what_it_was_checked_against():
    said = {
        since: FamilyPlan(family="A", model_class="a.B", since=since, modules={}, outputs={}).origin
        for since in ("0.33.0", "0.99.0")
    }
    assert said["0.33.0"] == "A plan (checked against ComfyUI 0.33.0)"
    assert said["0.99.0"] == "A plan (for ComfyUI 0.99.0, not yet checked against it)"


def test_a_restart_forgets_the_streams_and_counts_them():
    (state, _) = states()
    for length in (5, 8):
        state.define("audio", length)
        assert state.layout(("audio",)).total == length
        state.restart()
    assert state.tokens() == {"audio": (13, 7)}
    assert not state.knows(("audio",))


def test_check_names_what_is_missing():
    model = nn.Sequential(Block(), Block())
    good = ModulePlan(inputs={"x": ContextParallelInput(1)})
    plan(**{"*": good}).check(model)
    with pytest.raises(
        PlanError, match=r"Test plan \(checked against ComfyUI 0.30.0 and 0.33.0\): 0 \(Block\) has no argument 'img'; it has x, pe"
    ):
        plan(**{"*": ModulePlan(inputs={"img": ContextParallelInput(1)})}).check(model)
    with pytest.raises(PlanError, match=r"no module 'blocks.\*' in Sequential"):
        plan(**{"blocks.*": good}).check(model)
    with pytest.raises(PlanError, match="no module 'cross_attn'"):
        plan(**{"*": ModulePlan(local=("cross_attn",))}).check(model)
    with pytest.raises(PlanError, match="no module '1'"):  # an output
        plan(**{"*": good}).check(model[:1])


def test_patterns_name_one_all_or_the_last_of_a_list():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block() for _ in range(11)]), "out": Block()})
    assert [name for name, _ in find_modules(model, "blocks.*")] == [f"blocks.{i}" for i in range(11)]
    assert find_modules(model, "blocks.-1") == [("blocks.10", model["blocks"][10])]
    assert find_modules(model, "") == [("", model)]
    with pytest.raises(PlanError, match=r"no module 'out\.-1'"):
        find_modules(model, "out.-1")


def test_a_module_that_not_every_model_has_may_be_missing_and_what_is_in_it_may_not():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block()])})
    assert find_modules(model, "refiner?.layers.*") == []
    assert find_modules(model, "blocks?.*") == [("blocks.0", model["blocks"][0])]
    with pytest.raises(PlanError, match=r"no module 'blocks\?\.0\.attention'"):
        find_modules(model, "blocks?.0.attention")


def test_a_module_that_a_list_holds_twice_is_planned_once():
    """It would split its input twice."""
    block = Block()
    assert find_modules(nn.ModuleList([block, Block(), block]), "*")[0] == ("0", block)
    assert len(find_modules(nn.ModuleList([block, Block(), block]), "*")) == 2


class Wrapper(nn.Module):
    """As layers of PEFT and blocks of caches are: what it is given goes on."""

    def __init__(self, inner, model=None):
        super().__init__()
        self.model, self.inner = model, inner

    def forward(self, x, *args, **kwargs):
        return self.inner(x, *args, **kwargs)


def test_a_wrapper_counts_as_what_it_wraps():
    model = nn.ModuleDict({"out": nn.Linear(2, 2)})
    linear, model["out"] = model["out"], Wrapper(model["out"])
    assert find_modules(model, "out") == [("out", model["out"])]
    assert argument_positions(model["out"])["input"] == 0
    model["block"] = Wrapper(nn.ModuleDict({"attn": linear}))
    assert find_modules(model, "block.attn") == [("block.inner.attn", linear)]


def test_a_wrapper_of_several_blocks_stands_for_all_of_them():
    """It may hold the model that it is in."""
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"blocks": blocks})
    model["blocks"] = nn.ModuleList([Wrapper(blocks, model)])
    assert find_modules(model, "blocks.0") == [("blocks.0", model["blocks"][0])]
    assert [module for _, module in find_modules(model, "blocks.*")] == [model["blocks"][0], *blocks]
    assert all(model.get_submodule(path) is module for path, module in find_modules(model, "blocks.*"))
    assert argument_positions(model["blocks"][0])["input"] == 0


def test_a_block_that_takes_more_than_it_names_is_no_wrapper():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x, y, z, *args, **kwargs):
            return self.linear(x)

    assert "input" not in argument_positions(Block())
