"""Flux 1, Kontext, Fill, Flux 2 and Klein."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, Model, Served, joint_mask, normal

FLUX = dict(
    in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=48, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=2,
    depth_single_blocks=2, axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX_2 = dict(
    FLUX, in_channels=32, out_channels=32, vec_in_dim=None, axes_dim=[16, 16, 16, 16], theta=2000, patch_size=1, qkv_bias=False,
    txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
)  # fmt: skip
MODELS = {
    "flux": Model("comfy.ldm.flux.model.Flux", FLUX, "Flux", {"image_model": "flux"}),
    "flux 1 head": Model("comfy.ldm.flux.model.Flux", dict(FLUX, hidden_size=64, num_heads=1), "Flux", {"image_model": "flux"}),
    "flux 2": Model("comfy.ldm.flux.model.Flux", FLUX_2, "Flux2", {"image_model": "flux2"}),
    "flux fill": Model("comfy.ldm.flux.model.Flux", dict(FLUX, in_channels=96), "FluxInpaint", {"image_model": "flux"}),
}


def flux(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, channels: int = 16, **extra: Any) -> dict[str, Any]:
    call = dict(
        x=normal(batch, channels, height, width), timestep=torch.linspace(0.3, 0.9, batch), context=normal(batch, text, 48),
        y=normal(batch, 32), guidance=torch.full((batch,), 3.5),
    )  # fmt: skip
    return {**call, **extra}


def flux_2(**extra: Any) -> dict[str, Any]:
    return {**flux(channels=32, height=6, width=6), "y": None, **extra}


REFS = [normal(1, 16, 8, 6, seed=5), normal(1, 16, 5, 7, seed=6)]
CASES = [
    Case("flux", "flux", flux),
    Case("flux batch 2", "flux", lambda: flux(batch=2)),
    Case("flux odd size", "flux", lambda: flux(height=13, width=9, text=5)),
    Case("flux one text token", "flux", lambda: flux(text=1)),
    Case("flux 1 head", "flux 1 head", flux),
    Case("flux no guidance", "flux", lambda: flux(guidance=None)),
    Case("flux fill", "flux fill", lambda: flux(channels=96)),
    Case("flux mask", "flux", lambda: flux(attention_mask=joint_mask(1, 7, 36)), ("attention_mask",)),
    Case("flux mask batch 2", "flux", lambda: flux(batch=2, attention_mask=joint_mask(2, 7, 36)), ("attention_mask",)),
    Case("flux additive mask", "flux", lambda: flux(attention_mask=normal(1, 43, 43)), ("attention_mask",)),
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
]
SERVED: list[Served] = []
