"""What becomes of tokens: what is shared, right or refused. Each check runs on every rank."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from diffusers_cases import MODES, degrees, flux, hunyuan, ltx_2, normal
from diffusers_models import ANYTHING, TOKENS, build, close, fill, fingerprint, forward, plan_of, refused, relative, sharded
from own_modules import (
    Both,
    Computed,
    OwnAttention,
    OwnMask,
    Prepared,
    Reshaped,
    TorchAttention,
    TorchFunction,
    Transformer,
    TwoWays,
    Windows,
)
from torch import Tensor, nn

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ModulePlan,
    ShardingPlan,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.errors import PlanError

POSITION = ContextParallelInput(split_dim=1, expected_dims=2)


OWN_PLAN = {
    "blocks.0": {"x": TOKENS},
    "blocks.*.attn": {"positions": [POSITION, POSITION]},
    "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


def unknown_tokens(rank: int, world: int) -> None:
    """The audio of LTX 2 is not in diffusers' plan: where that is given, nobody can tell that it is whole on every rank."""
    model = build("ltx 2")
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan=model._cp_plan)
    refused(lambda: forward(model, ltx_2()), kind=PlanError)


def _own_model(
    world: int,
    marks: dict[str, ModulePlan],
    modes: Sequence[str],
    arguments: dict[str, Any],
    tokens: int,
    context: int,
    mask: str | None = None,
) -> None:
    """One model by mode. Masks are for all tokens: a plan need not split them."""
    model, plan = fill(Transformer(**arguments)), {**OWN_PLAN, **marks}
    inputs = dict(hidden_states=normal(2, tokens, 8), context=normal(2, context, 20))
    if mask == "full":
        inputs["mask"] = torch.rand(2, 1, tokens, tokens, generator=torch.Generator().manual_seed(5)) > 0.4
        inputs["mask"][..., 0] = True
    elif mask == "keys":
        inputs["mask"] = normal(2, 1, 1, tokens)
    elif mask == "heads":
        inputs["mask"] = normal(2, arguments.get("heads", 3), tokens, tokens)
    before, expected = fingerprint(model), model(**inputs)
    for mode in modes:
        applied = apply_context_parallel(model, ContextParallelConfig(**degrees(mode, world), **ANYTHING), plan)
        close(relative(model(**inputs), expected), (mode, arguments, tokens, context, mask))
        assert applied.mesh.stats.collectives >= 3  # in two blocks and at the end
        remove_context_parallel(model, plan)
    assert fingerprint(model) == before


def own_model(rank: int, world: int) -> None:
    """Cross-attention to a context that every rank has is marked at its path."""
    marks, grouped = {"blocks.*.cross": ModulePlan(attention=())}, dict(heads=4, kv_heads=2)
    runs = [
        ({}, 17, 5),
        ({}, 2, 3),  # fewer tokens than ranks
        ({}, 12, 12 // world),  # a context as long as a shard
        (grouped, 17, 5),
        (dict(causal=True), 17, 5),
        ({}, 17, 5, "full"),
        ({}, 17, 5, "keys"),
        ({}, 17, 5, "heads"),
        (grouped, 3, 5, "heads"),
    ]
    for turn, run in enumerate(runs):  # by turns, as `diffusers_cases.turns`
        _own_model(world, marks, [MODES[(turn + world) % len(MODES)]], *run)


def own_model_marked_at_the_block(rank: int, world: int) -> None:
    """The same, said where the block is described: the other attention of the block is shared all the same."""
    _own_model(world, {"blocks.*": ModulePlan(local=("cross",))}, MODES, {}, 17, 5)


def out_of_reach(rank: int, world: int) -> None:
    """Attention that does not come by is right or refused. Over the own shard only it would be wrong without a word."""
    inner = [OwnAttention(32), TorchAttention(32), nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)]
    for module in inner:
        model = fill(nn.Sequential(nn.Linear(8, 32), module, nn.Linear(32, 8)))
        hidden = normal(2, 17, 8)
        expected = model(hidden)
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), BESIDE)
        with suppress(PlanError):
            close(relative((model(hidden),), (expected,)), type(module))


def text_left_out(rank: int, world: int) -> None:
    """A table that splits the image and not the text that attends with it, and one that keeps the text whole as a stream."""
    model, inputs = build("hunyuan video"), hunyuan(2, valid=(7, 2))
    rope, proj_out = plan_of(model)["rope"], ContextParallelOutput(1, 3)
    one = {"rope": rope, "transformer_blocks.0": {"hidden_states": TOKENS}, "proj_out": proj_out}
    words = ("hidden_states and 7 that every rank has whole", "replicated=True")
    refused(lambda: sharded(model, world, one, inputs), *words)
    text = ContextParallelInput(1, 3, streams=("encoder_hidden_states",), replicated=True)
    both = {**one, "transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": text}}
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(**degrees(MODES[world % len(MODES)], world), **ANYTHING), both)
    close(max(relative(forward(model, inputs), expected) for _ in range(2)))


def not_gathered(rank: int, world: int) -> None:
    model = build("flux")
    plan = {path: entry for path, entry in model._cp_plan.items() if path != "proj_out"}
    words = ("tokens of hidden_states only", "ContextParallelOutput(gather_dim=1)")
    refused(lambda: sharded(model, world, plan, flux()), *words)


def plans_that_say_too_little(rank: int, world: int) -> None:
    """A whole plan that leaves an attention out, or misspells its stream, and one name for tokens of two kinds."""
    model = fill(TwoWays())
    inputs = dict(hidden_states=normal(2, 6 * world, 8), context=normal(2, 6, 32), crosses=1)
    modules = {"inp": ModulePlan(inputs={"input": ContextParallelInput(1, 3, streams=("image",))})}
    right = {**modules, "attention": ModulePlan(attention=()), "last": ModulePlan(attention=("image",))}
    one_name = ModulePlan(inputs={"context": ContextParallelInput(1, 3, streams=("image",))})
    cases = [
        ("", right),
        ("last: attention over 6 keys of split tokens, and the plan does not say what it is over", {**right, "last": ModulePlan()}),
        (
            "the plan names img, of which nothing was split. Streams of this call: image",
            {**right, "last": ModulePlan(attention=("img",))},
        ),
        (
            "holds none of their tokens. Other tokens under the same name need a stream of their own",
            {**right, "attention": one_name},
        ),
    ]
    for words, plans in cases:
        plan = ShardingPlan(modules=plans, outputs={"out": ContextParallelOutput(1, 3, stream="image")})
        _right_or(words, model, world, plan, inputs)


def _right_or(words: str, model: nn.Module, world: int, plan: Any, inputs: dict[str, Any], **more: Any) -> None:
    """A sharded call gives what one process gives, or is refused with these words."""
    config, expected = ContextParallelConfig(ulysses_degree=world, **ANYTHING), model(**inputs)
    applied = apply_context_parallel(model, config, plan, **more)
    if words:
        refused(lambda: model(**inputs), words)
    else:
        close(relative(*(out if isinstance(out, tuple) else (out,) for out in (model(**inputs), expected))), type(model))
    applied.remove()


BESIDE = {"0": {"input": TOKENS}, "2": ContextParallelOutput(gather_dim=1, expected_dims=3)}
"""Of a module between two layers."""
PRODUCTS = "a matrix product brings tokens together"


def what_is_wrong_is_seen(rank: int, world: int) -> None:
    """In the first call: matrix products by following tokens, windows by comparison with one process."""
    for words, module, tokens, more in [
        (PRODUCTS, Both(), 6 * world, {}),
        (PRODUCTS, Reshaped(), 3 * world - 1, {}),  # that one rank sees
        ("or a rank has a single query", OwnMask(), world + 1, {}),  # a mask where a rank has one token
        ("verify found the output off", Windows(6), 6 * world, dict(verify="first")),
        ("", TorchFunction(), 6 * world, dict(verify="first")),
    ]:
        model = fill(nn.Sequential(nn.Linear(8, 32), module, nn.Linear(32, 8)))
        _right_or(words, model, world, BESIDE, dict(input=normal(2, tokens, 8)), **more)


def filled_through(view: Any) -> Any:
    """Keys that are written into a buffer through a view of it."""

    def prepare(keys: Tensor) -> Tensor:
        buffer = torch.zeros(keys.shape)
        view(buffer).copy_(view(keys))
        return buffer

    return prepare


def set_by_channels(keys: Tensor) -> Tensor:
    buffer = torch.zeros(keys.shape)
    for channels in (slice(16), slice(16, 32)):
        buffer[..., channels] = keys[..., channels]
    return buffer


def whole(keys: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 4 * 32).reshape(1, 4, 32)


FOLLOWED = {
    "channels that are set": set_by_channels,
    "whole tokens of its type": lambda k: whole(k).type_as(k).expand(len(k), 4, 32),
    "whole tokens of its device": lambda k: k.new_full((len(k), 4, 32), 0.5),
    "whole tokens cut off": lambda k: torch.cat([whole(k).expand(len(k), 4, 32), k], 1)[:, :4],
    "a view that is filled": filled_through(lambda t: t[:]),
    "items that are filled": lambda k: torch.stack([filled_through(lambda t: t)(item) for item in k]),
    "numpy": lambda k: torch.from_numpy(k.numpy() * 2),
    "einsum of one": lambda k: torch.einsum("blc->bcl", k).mT,
    "einsum for each token": lambda k: k * torch.einsum("blc,blc->bl", k, k)[..., None],
}


TOGETHER = {
    "einsum": lambda x: torch.einsum("blc,bmc->blm", x, x).sum(2, keepdim=True) + x,
    "einsum of three": lambda x: torch.einsum("blc,bmc,bmd->bld", x, x, x),
    "keywords": lambda x: torch.bmm(torch.matmul(input=x, other=x.mT), mat2=x),
    "linear": lambda x: torch.stack([F.linear(F.linear(item, item), item.T) for item in x]),
    "broadcast": lambda x: (x[:, :, None] * x[:, None]).sum(2),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax": lambda x: F.softmax(x, dim=1),
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(32, 32, 3), padding=1).mT,
    "group norm": lambda x: F.group_norm(x.mT, 2).mT,
    "order": lambda x: x.flip(1),
}  # fmt: skip


def what_becomes_of_tokens(rank: int, world: int) -> None:
    """Beside an attention that is shared, what is done to tokens is right, or refused on all ranks."""
    plan = {"0": {"input": TOKENS}, "3": ContextParallelOutput(gather_dim=1, expected_dims=3)}
    modules = [("", Prepared(prepare)) for prepare in FOLLOWED.values()]
    modules += [("split over the ranks", Computed(compute)) for compute in TOGETHER.values()]
    for words, module in modules:
        model = fill(nn.Sequential(nn.Linear(8, 32), TorchFunction(), module, nn.Linear(32, 8)))
        _right_or(words, model, world, plan, dict(input=normal(2, 6 * world - 1, 8)))


def other_ways(rank: int, world: int) -> None:
    """Calls of the same shapes that attend to something else."""
    model = fill(TwoWays())
    inputs = dict(hidden_states=normal(2, 6 * world - 1, 8), context=normal(2, 4, 32))
    expected = [model(**inputs, crosses=crosses) for crosses in (0, 1)]
    plan = {"inp": {"input": TOKENS}, "out": ContextParallelOutput(gather_dim=1, expected_dims=3)}
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan)
    for crosses in (1, 0, 1):
        close(relative(model(**inputs, crosses=crosses), expected[crosses]))
    model.crosses = 1
    close(relative(model(**inputs), expected[1]))
    model.crosses = 0
    refused(lambda: model(**inputs), "where the first call of this form had")
    close(relative(model(**inputs), expected[0]))
