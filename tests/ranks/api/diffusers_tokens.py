"""What becomes of tokens: what is shared, right or refused. Each check runs on every rank."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers_cases import MODES, degrees, flux, hunyuan, ltx_2, normal, wan_animate
from diffusers_models import ANYTHING, TOKENS, build, close, fill, fingerprint, forward, refused, relative, same
from own_modules import Computed, OwnAttention, OwnMask, TorchAttention, TorchFunction, Transformer, TwoWays, Windows
from torch import nn

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
    """The audio of LTX 2 is not in diffusers' plan: where that is given, nobody can tell that it is whole on every rank. A frame of
    Wan Animate, whose tokens are split, cannot attend to several moments in turn."""
    model = build("ltx 2")
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan=model._cp_plan)
    refused(lambda: forward(model, ltx_2()), kind=PlanError)
    model = build("wan animate")
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    refused(lambda: forward(model, wan_animate(face=12)), "got 4 moments of a face; allowed: 3")


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
    model, inputs, config = (
        build("hunyuan video"),
        hunyuan(2, valid=(7, 2)),
        ContextParallelConfig(ulysses_degree=world, **ANYTHING),
    )
    expected = forward(model, inputs)
    rope, proj_out = {i: ContextParallelInput(0, 2, split_output=True) for i in (0, 1)}, ContextParallelOutput(1, 3)
    one = {"rope": rope, "transformer_blocks.0": {"hidden_states": TOKENS}, "proj_out": proj_out}
    refused(
        partial(same, model, config, inputs, expected, plan=one, verify="never"),
        "keys does not fit the tokens of rank",
        "attention=()",
    )
    text = ContextParallelInput(1, 3, streams=("encoder_hidden_states",), replicated=True)
    both = {**one, "transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": text}}
    apply_context_parallel(model, ContextParallelConfig(**degrees(MODES[world % len(MODES)], world), **ANYTHING), both)
    close(max(relative(forward(model, inputs), expected) for _ in range(2)))


def not_gathered(rank: int, world: int) -> None:
    model = build("flux")
    plan = {path: entry for path, entry in model._cp_plan.items() if path != "proj_out"}
    words = ("tokens were split and not gathered", "ContextParallelOutput(gather_dim=1)")
    config, inputs = ContextParallelConfig(ulysses_degree=world, **ANYTHING), flux()
    refused(partial(same, model, config, inputs, forward(model, inputs), plan=plan), *words)


def plans_that_say_too_little(rank: int, world: int) -> None:
    """A whole plan that leaves an attention out, or misspells its stream."""
    model = fill(TwoWays())
    inputs = dict(hidden_states=normal(2, 6 * world, 8), context=normal(2, 6, 32), crosses=1)
    modules = {"inp": ModulePlan(inputs={"input": ContextParallelInput(1, 3, streams=("image",))})}
    right = {**modules, "attention": ModulePlan(attention=()), "last": ModulePlan(attention=("image",))}
    cases = [
        ("", right),
        (
            "last: attention over 6 keys beside split tokens, and the plan does not say what it is over",
            {**right, "last": ModulePlan()},
        ),
        (
            "the plan names img, of which nothing was split. Streams of this call: image",
            {**right, "last": ModulePlan(attention=("img",))},
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
OFF = "verify found the output off"


def what_is_wrong_is_seen(rank: int, world: int) -> None:
    """In the first call, by comparison with one process."""
    for words, module, tokens in [
        (OFF, OwnAttention(32), 3 * world - 1),
        ("or a rank has a single query", OwnMask(), world + 1),  # a mask where a rank has one token
        (OFF, Windows(6), 6 * world),
        ("", TorchFunction(), 6 * world),
        (OFF, Computed(lambda x: x - x.mean(1, keepdim=True)), 6 * world),
        (OFF, Computed(lambda x: F.conv1d(x.mT, torch.ones(32, 32, 3), padding=1).mT), 6 * world - 1),
        (OFF, Computed(lambda x: x.flip(1)), 6 * world - 1),
    ]:
        model = fill(nn.Sequential(nn.Linear(8, 32), TorchFunction(), module, nn.Linear(32, 8)))
        plan = {"0": {"input": TOKENS}, "3": ContextParallelOutput(gather_dim=1, expected_dims=3)}
        _right_or(words, model, world, plan, dict(input=normal(2, tokens, 8)))


def other_ways(rank: int, world: int) -> None:
    """An attention that is over the tokens, or over a context that every rank has, call by call: the plan cannot say both."""
    model = fill(TwoWays())
    inputs = dict(hidden_states=normal(2, 6 * world - 1, 8), context=normal(2, 4, 32))
    plan = {"inp": {"input": TOKENS}, "out": ContextParallelOutput(gather_dim=1, expected_dims=3)}
    expected = model(**inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan)
    for _ in range(2):
        refused(lambda: model(**inputs, crosses=1), "keys does not fit the tokens of rank", "attention=()")
        close(relative(model(**inputs), expected))


def streams_in_no_order(rank: int, world: int) -> None:
    """Two streams of a class that is not in the table of joint orders."""
    model = fill(TwoWays())
    plan = {"": {"hidden_states": TOKENS, "context": TOKENS}, "out": ContextParallelOutput(1, 3, stream="hidden_states")}
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    refused(
        lambda: apply_context_parallel(model, config, plan), "hidden_states and context", "ModulePlan(attention=(", kind=PlanError
    )
    said = {**plan, "attention": ModulePlan(attention=("hidden_states",), keys=("context",))}
    inputs = dict(hidden_states=normal(2, 6 * world - 1, 8), context=normal(2, 4, 32), crosses=1)
    _right_or("the plan does not say what it is over", model, world, said, inputs)
    _right_or("", model, world, {**said, "last": ModulePlan(attention=("hidden_states",))}, inputs)
