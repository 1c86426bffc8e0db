"""Rank script: diffusers models of which every rank keeps a part, against the same models whole on every rank; rank 0 reports."""

import diffusers
import torch
from diffusers_cases import degrees, flux, sd3, wan
from diffusers_configs import SD3
from diffusers_models import build, fill, forward, plan_of
from support.ranks import finish, report, start, worst

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ModulePlan,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.engine.weights.blocks import sizes_of
from cp_runtime.engine.weights.packing import ALIGNMENT, AbsentWeight

rank, world, _ = start()

TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
SD3_PLAN = {
    "transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS},
    "transformer_blocks.*.attn": ModulePlan(attention=("hidden_states", "encoder_hidden_states")),  # the image comes first
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


def with_a_plan():
    return fill(diffusers.SD3Transformer2DModel(**{**SD3, "num_layers": 3})), sd3(2), SD3_PLAN


def of_diffusers(name, inputs):
    model = build(name)
    return model, inputs, plan_of(model)


MODELS = {"flux": lambda: of_diffusers("flux", flux(batch=2)), "wan": lambda: of_diffusers("wan t2v", wan()), "sd3": with_a_plan}


def on_all(held):
    return worst(not held) == 0


def equal(one, other):
    return on_all(all(torch.equal(a, b) for a, b in zip(one, other, strict=True)))


# By turns: every model meets every mode.
MODES = {
    2: {"flux": "ulysses", "wan": "ring alltoall", "sd3": "ulysses"},
    3: {"flux": "ring alltoall", "wan": "ulysses", "sd3": "ring alltoall"},
    4: {"flux": "unified alltoall", "wan": "unified alltoall", "sd3": "unified alltoall"},
}[world]
configs = {
    mode: ContextParallelConfig(**degrees(mode, world), ulysses_anything=True, ring_anything=True) for mode in MODES.values()
}
for name, make in MODELS.items():
    model, inputs, plan = make()
    config = configs[MODES[name]]
    before = {path: (parameter.clone(), parameter.requires_grad) for path, parameter in model.named_parameters()}
    sizes = sizes_of(model)
    with torch.inference_mode():
        stock = forward(model, inputs)
        apply_context_parallel(model, config, plan)
        whole = forward(model, inputs)
        remove_context_parallel(model)
    applied = apply_context_parallel(model, config, plan, shard_weights=True)
    with torch.inference_mode():
        first, second = forward(model, inputs), forward(model, inputs)
        rest = sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, AbsentWeight))
        held = applied.weights.nbytes + rest
        remove_context_parallel(model)
        restored = forward(model, inputs)
    after = dict(model.named_parameters())
    came_back = [
        torch.equal(after[path], weight) and after[path].requires_grad is requires_grad
        for path, (weight, requires_grad) in before.items()
    ]
    report(
        model=name,
        mode=MODES[name],
        gathers=applied.mesh.stats.counts["weights"],
        equal={"first": equal(first, whole), "second": equal(second, whole), "restored": equal(restored, stock)},
        weights=on_all(all(came_back) and before.keys() == after.keys()),
        held=held,
        # Every weight, and every rank's part of a block, starts at a multiple of the alignment.
        bound=sizes.per_rank(world) + 3 * ALIGNMENT * (len(before) + world * len(applied.weights.blocks)),
    )
finish()
