"""What else must hold for a model outside of ComfyUI. Run by diffusers_ranks.py on every rank; what they return is reported."""

from __future__ import annotations

from typing import Any

import diffusers
import diffusers_pipelines as pipelines
import torch
from diffusers_applying import (
    anything_off,
    applied_removed_applied,
    applied_twice,
    backends,
    configs,
    degrees_that_do_not_fit,
    fsdp,
    gradients,
    meshes,
    wrong_plans,
)
from diffusers_cases import CASES, MODES, degrees, flux, normal, padding, qwen
from diffusers_models import build, forward, plan_of, relative
from diffusers_tokens import (
    not_gathered,
    other_ways,
    out_of_reach,
    own_model,
    own_model_marked_at_the_block,
    plans_that_say_too_little,
    text_left_out,
    unknown_tokens,
    what_becomes_of_tokens,
    what_is_wrong_is_seen,
)
from diffusers_trials import ANYTHING, message_of

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel


def one_rank_alone(rank: int, world: int) -> dict[str, Any]:
    """What only one rank does wrong in a first call, and a cache that would have ranks go separate ways."""
    model, results = build("flux"), dict[str, Any]()
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    model.train(rank == world - 1)
    results["training"] = message_of(lambda: forward(model, flux()))
    model.eval()
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.02))
    results["cache"] = message_of(lambda: forward(model, flux()))
    return results


def other_inputs(rank: int, world: int) -> dict[str, Any]:
    """Inputs that are not the same on all ranks are named in the first call, and with check_inputs in each."""
    model, results = build("flux"), dict[str, Any](world=world)
    mine = flux(hidden_states=normal(1, 30, 16, seed=rank == world - 1))
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    apply_context_parallel(model, config)
    results["first"] = message_of(lambda: forward(model, mine))
    results["guidance"] = message_of(lambda: forward(model, flux(guidance=torch.full((1,), 3.5 + (rank == 0)))))
    forward(model, flux())
    results["second"] = message_of(lambda: forward(model, mine))
    remove_context_parallel(model)
    apply_context_parallel(model, config, check_inputs=True)
    forward(model, flux())
    results["second, checked"] = message_of(lambda: forward(model, mine))
    for name, more in [("option", dict(check_inputs=rank == 0)), ("shares", {})]:
        remove_context_parallel(model)
        shares = (1 + (rank == 0 and not more),) + (1,) * (world - 1)
        other = ContextParallelConfig(ulysses_degree=world, **ANYTHING, shares=shares)
        apply_context_parallel(model, other, **more)
        results[f"other {name}"] = message_of(lambda: forward(model, flux()))
    return results


def batch_axis(rank: int, world: int) -> dict[str, Any]:
    """Items of a batch on groups of ranks: more of them than groups, as many, and fewer, which all ranks share by tokens."""
    groups, results = 3 if world == 3 else 2, {}
    shapes = [dict(ulysses_degree=world // groups), dict(ring_degree=world // groups, rotate_method="alltoall")]
    for name, make in [("flux", flux), ("qwen", masked_qwen)]:
        model = build(name)
        expected = {items: forward(model, make(batch=items)) for items in (1, groups, groups + 1)}
        for shape in shapes:
            applied = apply_context_parallel(model, ContextParallelConfig(**shape, **ANYTHING, batch_degree=groups), verify="first")
            for items, outputs in expected.items():
                applied.mesh.stats.reset()
                found = forward(model, make(batch=items))
                results[f"difference of {items} {name} {shape}"] = relative(found, outputs)
                if world == groups <= items:  # each group is one rank
                    results["only outputs"] = applied.mesh.stats.collectives == 1
            remove_context_parallel(model)
    config = ContextParallelConfig(1, world // groups, **ANYTHING, batch_degree=groups)
    apply_context_parallel(model, config, verify="first")
    results["output class"] = type(model(**masked_qwen(batch=groups))).__name__
    model = build("flux")  # positions have a row for each token
    for name, inputs in [("text", flux(batch=groups, text=groups)), ("image", flux(batch=groups, height=1, width=groups))]:
        expected = forward(model, inputs)
        apply_context_parallel(model, config)
        results[f"difference of as many tokens of {name} as items"] = relative(forward(model, inputs), expected)
        remove_context_parallel(model)
    # Two noise levels, and a number for each of two layers.
    for case in (case for case in CASES if case.name in ("minimax h3 odd batch 2", "wan vace batch 2 odd")):
        model, inputs = build(case.model), case.make()
        expected = forward(model, inputs)
        apply_context_parallel(model, config, plan_of(model))
        results[f"difference of {case.name}"] = relative(forward(model, inputs), expected)
    return results


def masked_qwen(batch: int) -> dict[str, Any]:
    return qwen(batch=batch, text=8, encoder_hidden_states_mask=padding(*range(5, 5 + batch), length=8))


def pipeline(rank: int, world: int) -> dict[str, Any]:
    """Pipelines of diffusers, with one line more than without ranks: one whose CFG is a batch of two, and those with a plan."""
    pipe, groups = pipelines.load("sd3"), 3 if world == 3 else 2
    expected = pipelines.run("sd3", pipe)
    batches = ContextParallelConfig(ulysses_degree=world // groups, **ANYTHING, batch_degree=groups)
    refusal = message_of(lambda: apply_context_parallel(pipe, batches))
    apply_context_parallel(pipe.transformer, batches, plan_of(pipe.transformer))
    difference = relative((pipelines.run("sd3", pipe),), (expected,))
    results: dict[str, Any] = {"difference sd3": difference, "clean": True, "refusal": refusal}
    if world == 4:
        return results
    for i, name in enumerate(name for name in pipelines.PIPELINES if name != "sd3"):
        pipe = pipelines.load(name)
        expected = pipelines.run(name, pipe)
        config = ContextParallelConfig(**degrees(MODES[(i + world) % len(MODES)], world), **ANYTHING)
        models = [model for model in (pipe.transformer, getattr(pipe, "transformer_2", None)) if model is not None]
        applied = [apply_context_parallel(model, config) for model in models]
        results[f"difference {name}"] = relative((pipelines.run(name, pipe),), (expected,))
        results["clean"] &= all(each.mesh.stats.collectives > 2 for each in applied)
    return results


CHECKS = (
    applied_removed_applied, applied_twice, configs, meshes, degrees_that_do_not_fit, anything_off, wrong_plans, gradients,
    unknown_tokens, own_model, own_model_marked_at_the_block, out_of_reach, text_left_out, not_gathered, backends,
    plans_that_say_too_little, what_is_wrong_is_seen, what_becomes_of_tokens, other_ways, one_rank_alone, other_inputs,
    batch_axis, pipeline, fsdp,
)  # fmt: skip


# What is refused, and with which words, is the same on any number of ranks.
ON_TWO_RANKS = (
    applied_twice, degrees_that_do_not_fit, wrong_plans, gradients, unknown_tokens, not_gathered, backends,
    plans_that_say_too_little,
)  # fmt: skip
