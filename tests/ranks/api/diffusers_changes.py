"""What is changed after applying: modules, weights, forwards and inputs. Each check runs on every rank."""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from diffusers_cases import CASES, MODES, degrees, flux, normal
from diffusers_models import ANYTHING, build, close, forward, plan_of, refused, relative, stock
from torch import Tensor, nn

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.diffusers.known import own_table
from cp_runtime.engine.plan import find_modules

PLACES = ("flux", "qwen edit", "wan t2v", "ltx 2 with audio", "sd3", "hunyuan video from an image", "wan vace", "lumina 2")


class Wrapper(nn.Module):
    """Runs a module as PEFT's layers do: with whatever it is given, and a linear one beside another, which adds nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.beside = nn.Parameter(torch.zeros_like(inner.weight)) if isinstance(inner, nn.Linear) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out if self.beside is None else out + nn.functional.linear(args[0], self.beside)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class CachedBlocks(nn.Module):
    """Stands in for the blocks of a model while its forward runs, as those of cache-dit: after the first one it compares what that
    was given with what it returned, and may leave out the others."""

    def __init__(self, transformer: nn.Module, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.transformer, self.blocks, self.skipped, self.kept = transformer, blocks, 0, None

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.blocks
        out = first(hidden_states, encoder_hidden_states, *args, **kwargs)
        image = (out if isinstance(out, Tensor) else out[1]) - hidden_states
        if self.kept is not None and (image - self.kept[0]).abs().mean() < 0.1 * image.abs().mean():
            self.skipped += 1
            return self.kept[1]
        for block in others:
            text, tokens = (encoder_hidden_states, out) if isinstance(out, Tensor) else out
            out = block(tokens, text, *args, **kwargs)
        self.kept = image, out
        return out


def _cache(model: nn.Module, name: str) -> CachedBlocks:
    theirs, cached = model.forward, CachedBlocks(model, getattr(model, name))

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(model, name, nn.ModuleList([cached])):
            return theirs(*args, **kwargs)

    model.forward = forward
    return cached


def blocks_change_in_the_forward(rank: int, world: int) -> None:
    """Caches that put other blocks into the model while it runs, enabled before applying and after."""
    for name, blocks in (("qwen", "transformer_blocks"), ("wan t2v", "blocks"), ("sd3", "transformer_blocks")):
        case = next(case for case in CASES if case.model == name)
        calls = [case.make() for _ in range(3)]
        for number, call in enumerate(calls):
            call["hidden_states"] = call["hidden_states"] * (1 + 0.01 * number)
        model = build(name)
        cached = _cache(model, blocks)
        expected = [forward(model, call) for call in calls]
        assert cached.skipped == 2
        for before in (True, False):
            model = build(name)
            if before:
                _cache(model, blocks)
            apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
            if not before:
                cached = _cache(model, blocks)
            for number, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
                close(relative(forward(model, call), wanted), (name, before, number))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def planned_modules_change(rank: int, world: int) -> None:
    """Every module that a table names is wrapped, unwrapped, and replaced by another one, after applying."""
    for turn, case in enumerate(case for case in CASES if case.name in PLACES):
        model, fresh = build(case.model), build(case.model)
        paths = dict.fromkeys(path for pattern in own_table(model) for path, _ in find_modules(model, pattern) if path)
        config = ContextParallelConfig(**degrees(MODES[turn % len(MODES)], world), **ANYTHING)
        applied = apply_context_parallel(model, config, plan_of(model))
        for change in ("wrapped", "unwrapped", "replaced"):
            for path in sorted(paths, key=lambda path: path.count("."), reverse=change == "wrapped"):  # from inside, and back
                if change == "replaced":
                    _put(model, path, fresh.get_submodule(path))
                elif change == "wrapped":
                    _put(model, path, Wrapper(model.get_submodule(path)))
                else:
                    _put(model, path, model.get_submodule(path).inner)
            applied.mesh.stats.reset()
            close(relative(forward(model, case.make()), stock(case)), (case.name, change))
            assert applied.mesh.stats.counts["all_gather"] > 0
        remove_context_parallel(model)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def wrapped_before(rank: int, world: int) -> None:
    """The last layer and a block have been wrapped before applying, and are unwrapped after it."""
    case = next(case for case in CASES if case.name == "sd3")
    model = build("sd3")
    model.proj_out, model.transformer_blocks[0] = Wrapper(model.proj_out), Wrapper(model.transformer_blocks[0])
    applied = apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    for _ in range(2):
        applied.mesh.stats.reset()
        close(relative(forward(model, case.make()), stock(case)))
        assert applied.mesh.stats.counts["all_gather"] > 0
        model.proj_out, model.transformer_blocks[0] = (
            getattr(each, "inner", each) for each in (model.proj_out, model.transformer_blocks[0])
        )


def later_inputs(rank: int, world: int) -> None:
    """What differs between ranks in a later call is refused in that call, and the next one is right."""
    model, own, last = build("flux"), rank == world - 1, f"on rank {world - 1}: not what rank 0 was given"
    expected = forward(model, flux())
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    for mode in (torch.no_grad, torch.inference_mode):
        with torch.inference_mode(False), mode():
            inputs = flux()
            forward(model, inputs)
            refused(lambda: forward(model, flux(hidden_states=normal(1, 30, 16, seed=own))), f"hidden_states {last}")
            refused(lambda: forward(model, flux(timestep=torch.tensor([0.3 + own]))), f"timestep {last}")
            text = inputs["encoder_hidden_states"]
            model(**inputs)
            text += own
            refused(partial(model, **inputs), f"encoder_hidden_states {last}")
            pair = flux(2)
            forward(model, pair)
            for name in ("hidden_states", "encoder_hidden_states", "timestep"):  # the same numbers, of other items
                order = pair[name].flip(0) if own else pair[name]
                refused(partial(forward, model, {**pair, name: order}), f"{name} {last}")
            close(relative(forward(model, flux()), expected))


@torch.inference_mode(False)
@torch.no_grad()
def weights_of_one_rank(rank: int, world: int) -> None:
    """A LoRA on one rank alone, before the first call and after it, and weights that one rank changes in place."""
    own, last = rank == world - 1, f"its weights on rank {world - 1}"
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    for called in (False, True):
        model = build("flux")
        model.x_embedder.weight.mul_(1 + (own and not called))
        apply_context_parallel(model, config)
        if called:
            forward(model, flux())
        else:
            refused(partial(forward, model, flux()), last)
            model.x_embedder.weight.div_(1 + own)
        block = model.single_transformer_blocks[0]
        layer = block.proj_mlp
        if own:
            block.proj_mlp = Wrapper(layer)
        refused(partial(forward, model, flux()), last)
        block.proj_mlp = layer
        forward(model, flux())
        layer.weight += own
        refused(partial(forward, model, flux()), last)


def wrapped_forwards(rank: int, world: int) -> None:
    """Wrappers of the forward, as for offload, before and after: removal removes; one that leaves ours out is named."""
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    for batch in ({}, dict(batch_degree=world, ulysses_degree=1)):
        model, inputs = build("flux"), flux(batch=world)
        expected = forward(model, inputs)
        applied = apply_context_parallel(model, ContextParallelConfig(**{"ulysses_degree": world, **batch}, **ANYTHING))
        theirs = model.forward
        model.forward = wraps(theirs)(partial(theirs))
        close(relative(forward(model, inputs), expected))
        remove_context_parallel(model)
        applied.mesh.stats.reset()
        close(relative(forward(model, inputs), expected))
        assert applied.mesh.stats.collectives == 0
        again = apply_context_parallel(model, config)
        close(relative(forward(model, inputs), expected))
        assert again.mesh.stats.collectives > 2
    model = build("flux")
    apply_context_parallel(model, config)
    forward(model, flux())
    model.forward = partial(type(model).forward, model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            forward(model, flux())
    said = [str(each.message) for each in told if "was called on this rank alone" in str(each.message)]
    assert len(said) == 1, said
    assert "partial has replaced its forward since apply_context_parallel" in said[0], said


FEATURES: dict[str, Callable[[Any], object]] = {
    "casting": lambda model: model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32),
    "fused": lambda model: model.fuse_qkv_projections(),
}


@torch.inference_mode(False)
@torch.no_grad()
def features_of_diffusers(rank: int, world: int) -> None:
    """Before applying and after, of whole weights and of parts: right, or refused where that would change weights."""
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    for name, enable in FEATURES.items():
        model = build("flux")
        enable(model)
        expected = forward(model, flux())
        for before in (True, False):
            for shard in (True, False):
                model = build("flux")
                if before:
                    enable(model)
                applied = apply_context_parallel(model, config, shard_weights=shard)
                if not before:
                    forward(model, flux())
                    if shard:
                        refused(partial(enable, model), "every rank keeps a part", "remove_context_parallel")
                        continue
                    enable(model)
                for _ in range(2):
                    close(relative(forward(model, flux()), expected), (name, before, shard))
                applied.remove()
                close(relative(forward(model, flux()), expected), (name, before, shard))
