"""One node that attaches step caches to a transformer, in the shapes of the packs that people use most."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from comfy.ldm.flux.layers import timestep_embedding
from comfy.ldm.wan.model import sinusoidal_embedding_1d
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from .node import node
from .on_tokens import blocks_of

THRESHOLD = 3.0  # of random weights, whose results change much from step to step


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().mean() < THRESHOLD * other.abs().mean())


# --- a forward for the time of a call, which notes on the transformer what it skips (TeaCache, MagCache)


def flux_forward(
    self: Any, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor, y: Tensor, guidance: Any = None,
    control: Any = None, timestep_zero_index: Any = None, transformer_options: Any = None, attn_mask: Any = None,
) -> Tensor:  # fmt: skip
    """Flux' forward without what the test's models do not need, around a cache."""
    img = self.img_in(img)
    vec = self.time_in(timestep_embedding(timesteps, 256).to(img.dtype))
    if self.params.guidance_embed and guidance is not None:
        vec = vec + self.guidance_in(timestep_embedding(guidance, 256).to(img.dtype))
    if self.vector_in is not None:
        vec = vec + self.vector_in(y[:, : self.params.vec_in_dim])
    txt = self.txt_in(txt)
    pe = self.pe_embedder(torch.cat((txt_ids, img_ids), dim=1))
    before = img
    if skips(self, vec, transformer_options):
        img = img + self.test_cache["residual"]
    else:
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, attn_mask=attn_mask, transformer_options=transformer_options)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe, attn_mask=attn_mask, transformer_options=transformer_options)
        img = img[:, txt.shape[1] :]
        self.test_cache["residual"] = img - before
    return self.final_layer(img, vec)


def wan_forward(
    self: Any, x: Tensor, t: Tensor, context: Tensor, clip_fea: Any = None, freqs: Any = None, transformer_options: Any = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Wan's forward around a cache. Blocks get no options, as before they took any."""
    x = self.patch_embedding(x.float()).to(x.dtype)
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)
    e = self.time_embedding(sinusoidal_embedding_1d(self.freq_dim, t).to(x.dtype))
    e0 = self.time_projection(e).unflatten(1, (6, self.dim))
    context = self.text_embedding(context)
    if skips(self, e, transformer_options):
        x += self.test_cache["residual"]
    else:
        before = x.clone()
        for block in self.blocks:
            x = block(x, e=e0, freqs=freqs, context=context)
        self.test_cache["residual"] = x - before
    out: Tensor = self.unpatchify(self.head(x, e), grid)
    return out


def skips(self: Any, signal: Tensor, options: Any) -> bool:
    """Decide as these caches do: by how much the modulated input has changed since it was computed last."""
    cache = self.test_cache = getattr(self, "test_cache", None) or {"skipped": 0}
    last, cache["signal"] = cache.get("signal"), signal
    if last is None or last.shape != signal.shape or not close(signal, last) or options["test_step"] % 2 == 0:
        return False
    cache["skipped"] += 1
    return True


def tea_cache(model: ModelPatcher, resets: bool = True, skipping: bool = True) -> None:
    """A wrapper in ComfyUI's process resets the cache at the first step, and replaces the forward for every call."""
    transformer = model.model.diffusion_model
    forward = FORWARDS[type(transformer).__name__]

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        options = args["c"]["transformer_options"]
        sigmas = options["sample_sigmas"]
        step = int((sigmas - args["timestep"][0]).abs().argmin())
        if resets and step == 0 and hasattr(transformer, "test_cache"):
            del transformer.test_cache
        options["test_step"] = step + (not resets) if skipping else 0  # also at the first step, where notes last
        with patch.multiple(transformer, forward_orig=forward.__get__(transformer, type(transformer))):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


FORWARDS: dict[str, Any] = {"Flux": flux_forward, "WanModel": wan_forward}

# --- blocks in the place of blocks for the time of a call, with a global for the run's cache (First Block Cache)

_context: dict[str, Any] | None = None


@contextmanager
def cache_context(context: dict[str, Any]) -> Iterator[None]:
    global _context
    before, _context = _context, context
    try:
        yield
    finally:
        _context = before


class CachedBlocks(nn.Module):
    """Runs the first block, and the others only where its result has changed."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context = _context
        assert context is not None
        given = tokens_of(args, kwargs).clone()  # blocks change their inputs in place
        out = self.blocks[0](*args, **kwargs)
        first = tokens_of(*following(out, args, kwargs)).clone()
        change, last = first - given, context.get("change")
        context["calls"] += 1
        if last is not None and last.shape == change.shape and close(change, last) and context["calls"] % 2:
            return with_tokens(out, first + context["residual"], kwargs)
        context["change"] = change
        for block in list(self.blocks)[1:]:
            args, kwargs = following(out, args, kwargs)
            out = block(*args, **kwargs)
        context["residual"] = tokens_of(*following(out, args, kwargs)) - first
        return out


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the picture's tokens among the arguments of a block."""
    tokens: Tensor = kwargs["img"] if "img" in kwargs else kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return tokens


def following(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the next block."""
    if "img" in kwargs:
        return args, {**kwargs, "img": out[0], "txt": out[1]}
    if "hidden_states" in kwargs:
        return args, {**kwargs, "encoder_hidden_states": out[0], "hidden_states": out[1]}
    return (out, *args[1:]), kwargs


def with_tokens(out: Any, tokens: Tensor, kwargs: dict[str, Any]) -> Any:
    if isinstance(out, Tensor):
        return tokens
    return (tokens, out[1]) if "img" in kwargs else (out[0], tokens)


def first_block_cache(model: ModelPatcher) -> None:
    transformer = model.model.diffusion_model
    name = blocks_of(model)
    context: dict[str, Any] = {"calls": 0}
    cached = nn.ModuleList([CachedBlocks(getattr(transformer, name))])

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        sigmas = args["c"]["transformer_options"]["sample_sigmas"]
        if float(args["timestep"][0]) >= float(sigmas[0]):
            context.clear()
            context["calls"] = 0
        with cache_context(context), patch.object(transformer, name, cached):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


# --- a forward around the transformer's own: it decides in ComfyUI's process


def around_forward(model: ModelPatcher) -> None:
    """Repeats the last result at every second call."""
    transformer = model.model.diffusion_model
    kept: dict[str, Any] = {"calls": 0}

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        stock = transformer.forward

        def forward(*given: Any, **named: Any) -> Any:
            kept["calls"] += 1
            if kept["calls"] % 2:
                kept["out"] = stock(*given, **named)
            return kept["out"]

        with patch.object(transformer, "forward", forward):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


SHAPES: dict[str, Callable[[ModelPatcher], None]] = {
    "tea_cache": tea_cache,
    "lasting": partial(tea_cache, resets=False),
    "never_skips": partial(tea_cache, skipping=False),
    "first_block_cache": first_block_cache,
    "around_forward": around_forward,
}


@node("MODEL", again=True, model="MODEL", shape=list(SHAPES))
def TestStepCache(model: Any, shape: str) -> Any:
    """Attach a step cache to a clone of a transformer."""
    patched = model.clone()
    SHAPES[shape](patched)
    return patched
