"""Tiny models of every family, and calls of their innermost forward that use what the family can do.

Imported by the rank script (which has ComfyUI) and by the test (which has not): only torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLUX = dict(
    in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=48, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=2,
    depth_single_blocks=2, axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX_2 = dict(
    FLUX, in_channels=32, out_channels=32, vec_in_dim=None, axes_dim=[16, 16, 16, 16], theta=2000, patch_size=1, qkv_bias=False,
    txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
)  # fmt: skip
WAN = dict(
    model_type="t2v", dim=96, out_dim=16, num_heads=4, ffn_dim=128, num_layers=2, patch_size=(1, 2, 2), freq_dim=64, in_dim=16,
    text_dim=48,
)  # fmt: skip
QWEN = dict(
    in_channels=64, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=48,
    axes_dims_rope=(16, 24, 24),
)  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("comfy.ldm.flux.model.Flux", FLUX),
    "flux 1 head": ("comfy.ldm.flux.model.Flux", dict(FLUX, hidden_size=64, num_heads=1)),
    "flux 2": ("comfy.ldm.flux.model.Flux", FLUX_2),
    "flux fill": ("comfy.ldm.flux.model.Flux", dict(FLUX, in_channels=96)),
    "wan t2v": ("comfy.ldm.wan.model.WanModel", WAN),
    "wan i2v": ("comfy.ldm.wan.model.WanModel", dict(WAN, model_type="i2v", in_dim=36)),
    "wan ref": ("comfy.ldm.wan.model.WanModel", dict(WAN, in_dim_ref_conv=16)),
    "qwen": ("comfy.ldm.qwen_image.model.QwenImageTransformer2DModel", QWEN),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flux(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, channels: int = 16, **extra: Any) -> dict[str, Any]:
    call = dict(
        x=normal(batch, channels, height, width), timestep=torch.linspace(0.3, 0.9, batch), context=normal(batch, text, 48),
        y=normal(batch, 32), guidance=torch.full((batch,), 3.5),
    )  # fmt: skip
    return {**call, **extra}


def flux_2(**extra: Any) -> dict[str, Any]:
    return {**flux(channels=32, height=6, width=6), "y": None, **extra}


def wan(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    call = dict(
        x=normal(batch, channels, frames, height, width),
        timestep=torch.linspace(300.0, 900.0, batch),
        context=normal(batch, text, 48),
    )
    return {**call, **extra}


def qwen(batch: int = 1, height: int = 12, width: int = 10, text: int = 9, **extra: Any) -> dict[str, Any]:
    call = dict(x=normal(batch, 16, 1, height, width), timesteps=torch.linspace(0.3, 0.9, batch), context=normal(batch, text, 48))
    return {**call, **extra}


def joint_mask(batch: int, text: int, image: int) -> Tensor:
    """Text attends to text and to half of the image, the image to everything: a regional mask, `[B, L, L]`, boolean."""
    mask = torch.ones(batch, text + image, text + image, dtype=torch.bool)
    mask[:, :text, text + image // 2 :] = False
    mask[:, text:, 1:3] = False
    return mask


def text_mask(batch: int, text: int, seed: int = 3) -> Tensor:
    mask = (torch.rand(batch, text, generator=torch.Generator().manual_seed(seed)) > 0.4).long()
    mask[:, 0] = 1
    return mask


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    make: Callable[[], dict[str, Any]]


REFS = [normal(1, 16, 8, 6, seed=5), normal(1, 16, 5, 7, seed=6)]
CASES = [
    Case("flux", "flux", flux),
    Case("flux batch 2", "flux", lambda: flux(batch=2)),
    Case("flux odd size", "flux", lambda: flux(height=13, width=9, text=5)),
    Case("flux one text token", "flux", lambda: flux(text=1)),
    Case("flux 1 head", "flux 1 head", flux),
    Case("flux no guidance", "flux", lambda: flux(guidance=None)),
    Case("flux fill", "flux fill", lambda: flux(channels=96)),
    Case("flux mask", "flux", lambda: flux(attention_mask=joint_mask(1, 7, 36))),
    Case("flux mask batch 2", "flux", lambda: flux(batch=2, attention_mask=joint_mask(2, 7, 36))),
    Case("flux additive mask", "flux", lambda: flux(attention_mask=normal(1, 43, 43))),
    Case("kontext offset", "flux", lambda: flux(ref_latents=REFS)),
    Case("kontext index", "flux", lambda: flux(ref_latents=REFS, ref_latents_method="index")),
    Case("kontext uxo", "flux", lambda: flux(ref_latents=REFS, ref_latents_method="uxo")),
    Case(
        "kontext timestep zero",
        "flux 2",
        lambda: flux_2(ref_latents=[normal(1, 32, 4, 5)], ref_latents_method="index_timestep_zero"),
    ),
    Case("flux 2", "flux 2", flux_2),
    Case("flux 2 reference", "flux 2", lambda: flux_2(ref_latents=[normal(1, 32, 4, 5)])),
    Case("wan t2v", "wan t2v", wan),
    Case("wan t2v batch 2 odd", "wan t2v", lambda: wan(batch=2, frames=5, height=7, width=9, text=5)),
    Case("wan one frame", "wan t2v", lambda: wan(frames=1)),
    Case("wan per-frame timesteps", "wan t2v", lambda: wan(timestep=torch.tensor([[0.0, 400.0, 900.0]]))),
    Case(
        "wan per-frame timesteps batch 2",
        "wan t2v",
        lambda: wan(batch=2, timestep=torch.tensor([[0.0, 400.0, 900.0], [10.0, 20.0, 30.0]])),
    ),
    Case("wan time concat", "wan t2v", lambda: wan(time_dim_concat=normal(1, 16, 2, 8, 10))),
    Case("wan context latents", "wan t2v", lambda: wan(context_latents=[normal(1, 16, 1, 6, 4)])),
    Case("wan i2v", "wan i2v", lambda: wan(channels=36)),
    Case("wan i2v clip", "wan i2v", lambda: wan(channels=36, clip_fea=normal(1, 257, 1280))),
    Case("wan reference latent", "wan ref", lambda: wan(reference_latent=normal(1, 16, 8, 10))),
    Case("qwen", "qwen", qwen),
    Case("qwen text mask", "qwen", lambda: qwen(attention_mask=text_mask(1, 9))),
    Case("qwen text mask batch 2", "qwen", lambda: qwen(batch=2, text=7, attention_mask=text_mask(2, 7))),
    Case("qwen edit", "qwen", lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8), normal(1, 16, 1, 5, 4)])),
    Case(
        "qwen edit timestep zero",
        "qwen",
        lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8)], ref_latents_method="index_timestep_zero"),
    ),
    Case(
        "qwen edit mask batch 2",
        "qwen",
        lambda: qwen(batch=2, attention_mask=text_mask(2, 9), ref_latents=[normal(2, 16, 1, 6, 8)]),
    ),
]
