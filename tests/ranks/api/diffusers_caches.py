"""diffusers' step caches and compiled blocks on a model that is context parallel. Each check runs on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.hooks import apply_first_block_cache
from diffusers_cases import MODES, cogvideox, degrees, flux, ltx, ltx_2, ltx_2_3, normal, qwen, wan
from diffusers_models import ANYTHING, build, close, forward, model_of, refused, relative
from support.faults import SOAK
from torch import Tensor, nn

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.compat import compiler_counts

CACHES = ("first block", "first block by its function", "pyramid", "faster", "mag", "taylor")
STEPS, TIMESTEP = 6, {"now": 0}
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {"flux": flux, "wan t2v": wan, "qwen": qwen, "ltx": ltx}


def _at() -> int:
    return TIMESTEP["now"]


def _enable(model: nn.Module, cache: str) -> None:
    """Enable a cache that skips some of the steps."""
    if cache == "first block":
        return model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    if cache == "first block by its function":
        return apply_first_block_cache(model, diffusers.FirstBlockCacheConfig(threshold=0.2))
    config = {
        "pyramid": lambda: diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000), current_timestep_callback=_at
        ),
        "faster": lambda: diffusers.FasterCacheConfig(
            spatial_attention_timestep_skip_range=(0, 681), current_timestep_callback=_at, is_guidance_distilled=True,
            attention_weight_callback=lambda _: 0.5,
        ),
        "mag": lambda: diffusers.MagCacheConfig(
            threshold=0.3, retention_ratio=0.2, num_inference_steps=STEPS, mag_ratios=[1.0] + [0.95] * (STEPS - 1)
        ),
        "taylor": lambda: diffusers.TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=2, max_order=1, taylor_factors_dtype=torch.float32
        ),
    }[cache]()  # fmt: skip
    return model.enable_cache(config)


def _disable(model: nn.Module) -> None:
    if model.is_cache_enabled:
        model.disable_cache()
    else:
        diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model)
        for module in model.modules():
            registry = getattr(module, "_diffusers_hook", None)
            for name in list(registry.hooks) if registry is not None else ():
                registry.remove_hook(name, recurse=False)


def _steps(model: nn.Module, make: Callable[[], dict[str, Any]]) -> list[tuple[Tensor, ...]]:
    """Outputs of steps whose latents drift, as those of a sampler do: those of the second item less."""
    outputs, inputs = [], make()
    for step in range(STEPS):
        TIMESTEP["now"] = 900 - 100 * step
        noise = normal(*inputs["hidden_states"].shape, seed=9)
        noise[1:] *= 0.1
        drift = (1.0 + 0.4 * (step == 3)) * inputs["hidden_states"] + 0.02 * step * noise
        with model.cache_context("cond"):
            outputs.append(forward(model, {**inputs, "hidden_states": drift}))
    return outputs


def caches(rank: int, world: int) -> None:
    """Each cache gives on ranks what it gives in one process: they skip alike, also by numbers that are about all tokens."""
    idle: list[tuple[str, str]] = []
    for turn, (name, make) in enumerate(INPUTS.items()):
        model = model_of(name)
        whole = _steps(model, make)
        for cache in CACHES:
            _enable(model, cache)
            expected = _steps(model, make)
            _disable(model)
            if max(relative(a, b) for a, b in zip(expected, whole, strict=True)) < 1e-3:  # it knows nothing to skip there
                idle.append((name, cache))
                continue
            for before in (True, False) if SOAK else (bool((turn + CACHES.index(cache)) % 2),):  # by turns
                if before:
                    _enable(model, cache)
                config = ContextParallelConfig(**degrees(MODES[(turn + before) % len(MODES)], world), **ANYTHING)
                apply_context_parallel(model, config)
                if not before:
                    _enable(model, cache)
                for step, (found, wanted) in enumerate(zip(_steps(model, make), expected, strict=True)):
                    close(relative(found, wanted), (name, cache, before, step))
                if not before:
                    _disable(model)
                remove_context_parallel(model)
                if before:
                    _disable(model)
    # By the mean over all items and no more than all tokens: groups hold one item each, and some ranks no token.
    model = model_of("flux")
    few = [(lambda: flux(batch=2), dict(batch_degree=2, ulysses_degree=world // 2)), (lambda: flux(height=1, width=1), {})]
    for make, degree in few:
        _enable(model, "first block")
        expected = _steps(model, make)
        _disable(model)
        _enable(model, "first block")
        apply_context_parallel(model, ContextParallelConfig(**(degree or dict(ulysses_degree=world)), **ANYTHING))
        for step, (found, wanted) in enumerate(zip(_steps(model, make), expected, strict=True)):
            close(relative(found, wanted), (degree, step))
        remove_context_parallel(model)
        _disable(model)
    _enable(model, "mag")
    apply_context_parallel(model, ContextParallelConfig(pipefusion_degree=world))
    refused(lambda: _steps(model, flux), "step cache (mag_cache", "disable_cache()")
    remove_context_parallel(model)
    _disable(model)
    assert idle == [("wan t2v", "taylor"), ("ltx", "taylor")], idle


def both_halves_cached(rank: int, world: int) -> None:
    """FasterCache with both halves of CFG in a call, one of which it leaves out: in calls of a new form, without attention."""
    for name, make in (("wan t2v", wan), ("cogvideox", cogvideox)):
        model = model_of(name)
        cache = diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 901), unconditional_batch_skip_range=2,
            unconditional_batch_timestep_skip_range=(-1, 901), current_timestep_callback=_at,
            attention_weight_callback=lambda _: 0.5,
            tensor_format="BFCHW" if name == "cogvideox" else "BCFHW",
        )  # fmt: skip
        model.enable_cache(cache)
        expected = _steps(model, partial(make, batch=2))
        _disable(model)
        for degree in (dict(ulysses_degree=world), dict(batch_degree=world)):
            model.enable_cache(cache)
            apply_context_parallel(model, ContextParallelConfig(**degree, **ANYTHING))
            if "batch_degree" in degree:
                refused(lambda: _steps(model, partial(make, batch=2)), "FasterCache", "batch_degree=1")  # noqa: B023
            else:
                for step, (found, wanted) in enumerate(zip(_steps(model, partial(make, batch=2)), expected, strict=True)):
                    close(relative(found, wanted), (name, step))
            remove_context_parallel(model)
            _disable(model)


def left_out_on_purpose(rank: int, world: int) -> None:
    """Blocks whose attention guidance leaves out, in the first call of all and in later ones."""
    model, inputs = build("ltx 2.3"), ltx_2_3()
    guided = [dict(spatio_temporal_guidance_blocks=blocks, perturbation_mask=torch.zeros(1)) for blocks in ([1], [0], [0, 1])]
    calls = [{**inputs, **more} for more in (*guided, {}, *guided)]
    expected = [forward(model, call) for call in calls]
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    for number, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        close(relative(forward(model, call), wanted), number)


class BesideTorch:
    """A processor that attends by another function than torch's."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any) -> Any:
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        out = attn.to_out[0]((q @ k.mT).softmax(-1) @ v)
        return out if encoder_hidden_states is None else (out, encoder_hidden_states)


def attended_another_way(rank: int, world: int) -> None:
    """It is refused by its name, in the first call and in later ones, also where another call has attended."""
    for called, replaced in ((False, False), (True, False), (True, True)):
        model = build("flux")
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
        if called:
            forward(model, flux())
        if replaced:
            model.transformer_blocks[1].attn = build("flux").transformer_blocks[1].attn
        model.transformer_blocks[1].attn.processor = BesideTorch()
        refused(partial(forward, model, flux()), "transformer_blocks.1.attn", "but by BesideTorch", 'backend "native"')


def compiled(rank: int, world: int) -> None:
    """Blocks compile into as many graphs as alone, without a break, before applying and after; a whole model breaks at gathers."""
    cases = {"flux": flux, "ltx 2": lambda: ltx_2(isolate_modalities=False)}
    for turn, (name, make) in enumerate((INPUTS | cases if SOAK else {"flux": flux}).items()):
        config, graphs = ContextParallelConfig(ulysses_degree=world, **ANYTHING), {}
        for kind in ("alone", "after" if turn % 2 else "before", *(("after", "before", "whole") if SOAK else ())):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model, inputs = build(name), make()
            expected = forward(model, inputs)
            if kind == "before":
                model.compile_repeated_blocks(fullgraph=True, backend="eager")
            if kind != "alone":
                apply_context_parallel(model, config)
            if kind == "whole":
                model.compile(backend="eager")
            elif kind != "before":
                model.compile_repeated_blocks(fullgraph=True, backend="eager")
            for _ in range(2):
                close(relative(forward(model, inputs), expected), (name, kind))
            counts = compiler_counts()
            graphs[kind] = counts["graphs"]
            assert kind == "whole" or graphs[kind] == graphs["alone"], (name, graphs)
            assert counts["breaks"] <= 4 * (kind == "whole"), (name, kind, counts)
    refused(partial(torch.compile(model, fullgraph=True, backend="eager"), **flux()), "compile_repeated_blocks(fullgraph=True)")
