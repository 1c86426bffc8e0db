"""Qwen-Image 2.1: texts and references in turn, then the image, in one sequence; blocks get the attention as a function."""

from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from support.next_classes.layers import Projections, attend, waves
from torch import Tensor, nn

Segments = list[tuple[int, int, Tensor | None]]


class Cache:
    """Keys and values of some prefixes, by block."""

    def __init__(self) -> None:
        self.slots: list[tuple[Tensor, dict[int, Tensor]]] = []
        self.blocks: dict[int, Tensor] = {}

    def select(self, key: Tensor, create: bool = True) -> bool:
        found = [blocks for known, blocks in self.slots if torch.equal(known, key)]
        if create and not found:
            found = [{}]
            self.slots.append((key, found[0]))
        self.blocks = found[0] if found else {}
        return bool(found)


def block_causal(segments: Segments, options: dict[str, Any], cache: Cache | None = None, index: int = 0) -> Callable[..., Tensor]:
    def attend_by_segments(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        if cache is not None:
            cache.blocks[index] = torch.stack([k, v], 1)
        return torch.cat(
            [
                optimized_attention(
                    *(t.flatten(2) for t in (q[:, start:end], k[:, :end], v[:, :end])),
                    heads,
                    mask=mask,
                    transformer_options=options,
                )
                for start, end, mask in segments
            ],
            1,
        )

    return attend_by_segments


def behind(kept: Tensor, options: dict[str, Any]) -> Callable[..., Tensor]:
    def attend_to_both(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        keys, values = (torch.cat(pair, 1) for pair in zip(kept.unbind(1), (k, v), strict=True))
        return attend(q, keys, values, heads, transformer_options=options)

    return attend_to_both


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.attn = Projections(dim, heads, operations, **place)
        self.img_mlp = operations.Linear(dim, dim, **place)

    def forward(self, x, mod, pe, attn_fn, prefix_len, transformer_options={}):  # noqa: B006
        def scaled(value: Tensor) -> Tensor:  # by one row before the image, and by another in it
            return torch.cat([value[:, :prefix_len] * mod[-1:], value[:, prefix_len:] * mod[:-1]], 1)

        q, k, v = self.attn.project(scaled(x), pe)
        x = x + self.attn.to_out(attn_fn(q, k, v, self.attn.heads))
        return x + scaled(self.img_mlp(x).tanh())


class QwenImage21Transformer2DModel(nn.Module):
    def __init__(
        self, in_channels, num_layers, attention_head_dim, num_attention_heads, context_in_dim, operations, **place
    ):  # fmt: skip
        super().__init__()
        dim = attention_head_dim * num_attention_heads
        self.head_dim = attention_head_dim
        self.txt_in = operations.Linear(context_in_dim, dim, **place)
        self.img_in = operations.Linear(in_channels, dim, **place)
        self.modulation = operations.Linear(1, dim, **place)
        self.transformer_blocks = nn.ModuleList([Block(dim, num_attention_heads, operations, **place) for _ in range(num_layers)])
        self.norm_out = operations.LayerNorm(dim, **place)
        self.proj_out = operations.Linear(dim, in_channels, **place)
        self.reset_prefix_cache(False)

    def reset_prefix_cache(self, enabled):
        self.prefix_cache, self.prefix_cache_enabled = None, enabled

    def select_prefix_cache(self, key, cache_bytes, device, options):
        if options.get("device") == "off":
            return None, False
        cache = self.prefix_cache = self.prefix_cache or Cache()
        cache.select(key)
        return cache, len(cache.blocks) == len(self.transformer_blocks)

    def build_sequence(self, x, context, ref_latents, image_slots):
        text = self.txt_in(context)
        slots = (image_slots + [text.shape[1]] * len(ref_latents))[: len(ref_latents)]
        parts, segments, total = [], [], 0
        for start, end, image in zip([0, *slots], [*slots, text.shape[1]], [*ref_latents, x], strict=True):
            for part in (text[:, start:end], self.img_in(image.flatten(2).transpose(1, 2))):
                length, is_text = part.shape[1], len(parts) % 2 == 0
                parts.append(part)
                if length:
                    mask = torch.ones(length, total + length, dtype=torch.bool, device=x.device).tril(total) if is_text else None
                    segments.append((total, total + length, mask))
                    total += length
        return torch.cat(parts, 1), waves(torch.arange(total, device=x.device), self.head_dim)[None, :, None], segments

    def forward(self, x, timestep, context, ref_latents=None, image_slots=None, transformer_options={}, **kwargs):  # noqa: B006
        return self._forward(x, timestep, context, ref_latents, image_slots, transformer_options, **kwargs)

    def _forward(self, x, timesteps, context, ref_latents=None, image_slots=None, transformer_options={}, **kwargs):  # noqa: B006
        batch, _, height, width = x.shape
        references, slots = list(ref_latents or []), list(image_slots or [])
        states, pe, segments = self.build_sequence(x, context, references, slots)
        prefix_len = states.shape[1] - height * width
        mod = 1.0 + self.modulation(torch.cat([timesteps, timesteps.new_zeros(1)])[:, None])[:, None]
        cache, cached = None, False
        if self.prefix_cache_enabled and prefix_len:
            key = torch.cat([t.flatten(1) for t in (context, *references)], 1)
            options = transformer_options.get("qwen_image21_cache", {})
            cache, cached = self.select_prefix_cache(key, states.nbytes, x.device, options)
        prefix = None
        if cache is not None:
            prefix, prefix_pe = states[:, :prefix_len], pe[:, :prefix_len]
            states, pe, prefix_len = states[:, prefix_len:], pe[:, prefix_len:], 0
        for index, block in enumerate(self.transformer_blocks):
            if cache is None:
                attention = block_causal(segments, transformer_options)
            else:
                if not cached:
                    attention = block_causal(segments[:-1], transformer_options, cache, index)
                    prefix = block(prefix, mod, prefix_pe, attention, prefix.shape[1], transformer_options)
                attention = behind(cache.blocks[index], transformer_options)
            states = block(states, mod, pe, attention, prefix_len, transformer_options)
        out = self.proj_out(self.norm_out(states[:, prefix_len:]))
        return out.transpose(1, 2).reshape(batch, -1, height, width)
