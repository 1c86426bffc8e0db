"""Rank script: every case of diffusers_cases.py, sharded in every way against the stock model in one process; rank 0 reports."""

import traceback

import diffusers_applying
import diffusers_caches
import diffusers_changes
import diffusers_checks
import diffusers_tokens
import torch
from diffusers_cases import BATCH, CASES, MODES, TWO_AXES, checks_on, degrees, turns
from diffusers_configs import MODELS
from diffusers_models import forward, model_of, plan_of, relative, stock
from support.ranks import finish, of_all, report, start

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel

rank, world, _ = start()


def reach(model, inputs, expected, causal):
    """How much the last token of the input, or where that is causal the first, moves the output token that it moves least."""
    latent = inputs.get("hidden_states")
    first, *others = inputs["x"] if latent is None else [latent]  # a list, of pictures of different sizes
    moved = (first[-1] if isinstance(first, list) else first).clone()
    at = (0, slice(2), slice(2)) if causal else (-1, slice(-2, None), slice(-2, None))
    moved[(slice(None), at[0]) if moved.ndim == 3 else (..., *at)] += 4.0  # tokens, or a video in patches of 2 x 2
    first = [*first[:-1], moved] if isinstance(first, list) else moved
    latents = {"x": [first, *others]} if latent is None else {"hidden_states": moved}
    change = (forward(model, {**inputs, **latents})[0] - expected[0]).abs()
    return (change.amax(1 if change.ndim == 5 else 2).min() / expected[0].std()).item()


modes = (*MODES, *{2: (BATCH,), 4: TWO_AXES}.get(world, ()))
# One configuration for all models, as for a pipeline with two transformers.
anything = {"ulysses_anything": True, "ring_anything": True, "ulysses_rounds": 2}
configs = {mode: ContextParallelConfig(**degrees(mode, world), **anything) for mode in modes}
with torch.inference_mode():
    for name in MODELS:
        model, cases = model_of(name), [case for case in CASES if case.model == name]
        for case in cases if world == 2 else ():  # it is the same on any number of ranks
            inputs, expected, unmasked = case.make(), stock(case), None
            if case.mask:
                unmasked = relative(forward(model, {**inputs, case.mask: torch.ones_like(inputs[case.mask])})[:1], expected[:1])
            std, moved = min(out.std().item() for out in expected), reach(model, inputs, expected, case.causal)
            report(case=case.name, mode="stock", std=std, reach=moved, mask_matters=unmasked)
        for mode, config in configs.items():
            taken = [case for case in cases if mode in turns(case, world)]
            if not taken:
                continue
            stats = apply_context_parallel(model, config, plan_of(model)).mesh.stats
            for case in taken:
                stats.reset()
                try:
                    out = forward(model, case.make())
                    report(case=case.name, mode=mode, difference=relative(out, stock(case)), collectives=stats.collectives)
                except Exception as error:  # noqa: BLE001  (the other cases still count)
                    report(case=case.name, mode=mode, difference=float("inf"), error=f"{type(error).__name__}: {error}")
            remove_context_parallel(model, plan_of(model))
    checks = (
        vars(diffusers_applying)
        | vars(diffusers_caches)
        | vars(diffusers_changes)
        | vars(diffusers_tokens)
        | vars(diffusers_checks)
    )
    for name in checks_on(world):
        error = None
        try:
            checks[name](rank, world)
        except Exception:  # noqa: BLE001  (the other checks still count)
            error = traceback.format_exc()
        report(check=name, error=next(filter(None, of_all(error)), None))
finish()
