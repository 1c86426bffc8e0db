"""Flux 1, Kontext, Fill, Flux 2 and Klein."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, joint_mask, normal, residuals

FLUX = dict(
    in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=48, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=2,
    depth_single_blocks=2, axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX_2 = dict(
    FLUX, in_channels=128, out_channels=128, vec_in_dim=None, axes_dim=[16, 16, 16, 16], theta=2000, patch_size=1, qkv_bias=False,
    txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
)  # fmt: skip
# Ovis and LongCat are Flux classes with these.
OVIS = dict(FLUX, vec_in_dim=None, guidance_embed=False, txt_ids_dims=[1, 2], yak_mlp=True, txt_norm=True)
LONGCAT = dict(FLUX, vec_in_dim=None, guidance_embed=False, txt_ids_dims=[1, 2])
MODELS = {
    "flux": Model("comfy.ldm.flux.model.Flux", FLUX, "Flux", {"image_model": "flux"}),
    "flux 1 head": Model("comfy.ldm.flux.model.Flux", dict(FLUX, hidden_size=64, num_heads=1), "Flux", {"image_model": "flux"}),
    "flux 3 heads": Model("comfy.ldm.flux.model.Flux", dict(FLUX, hidden_size=192, num_heads=3), "Flux", {"image_model": "flux"}),
    "flux 2": Model("comfy.ldm.flux.model.Flux", FLUX_2, "Flux2", {"image_model": "flux2"}),
    "klein": Model("comfy.ldm.flux.model.Flux", dict(FLUX_2, guidance_embed=False), "Flux2", {"image_model": "flux2"}),
    "flux fill": Model("comfy.ldm.flux.model.Flux", dict(FLUX, in_channels=96), "FluxInpaint", {"image_model": "flux"}),
    "flux redux": Model("comfy.ldm.flux.model.Flux", dict(FLUX, context_in_dim=4096), "Flux", {"image_model": "flux"}),
    "ovis": Model("comfy.ldm.flux.model.Flux", OVIS, "FluxSchnell", {"image_model": "flux"}),
    "longcat": Model("comfy.ldm.flux.model.Flux", LONGCAT, "LongCatImage", {"image_model": "flux"}),
}


def flux(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, channels: int = 16, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (channels, height, width), text, y=normal(batch, 32), guidance=torch.full((batch,), 3.5)) | extra


def flux_2(batch: int = 1, **extra: Any) -> dict[str, Any]:
    return {**flux(batch, channels=128, height=6, width=6), "y": None, **extra}


REFS = [normal(1, 16, 8, 6, seed=5), normal(1, 16, 5, 7, seed=6)]
REFS_2 = [normal(1, 128, 4, 5, seed=5), normal(1, 128, 3, 2, seed=6)]
CASES = [
    Case("flux", "flux", flux),
    Case("flux batch 2", "flux", lambda: flux(batch=2)),
    Case("flux odd size", "flux", lambda: flux(height=13, width=9, text=5)),
    Case("flux one text token", "flux", lambda: flux(text=1)),
    Case("flux 1 head", "flux 1 head", flux),
    Case("flux 3 heads batch 2", "flux 3 heads", lambda: flux(batch=2, height=10)),
    Case("flux no guidance", "flux", lambda: flux(guidance=None)),
    Case("flux fill", "flux fill", lambda: flux(channels=96)),
    Case("flux mask", "flux", lambda: flux(attention_mask=joint_mask(1, 7, 36)), ("attention_mask",)),
    Case("flux mask batch 2", "flux", lambda: flux(batch=2, attention_mask=joint_mask(2, 7, 36)), ("attention_mask",)),
    Case("flux additive mask", "flux", lambda: flux(attention_mask=normal(1, 43, 43)), ("attention_mask",)),
    Case("flux scaled positions", "flux", flux, options={"rope_options": {"scale_x": 0.7, "scale_y": 1.3, "shift_t": 1.0}}),
    Case("flux control", "flux", lambda: flux(control=residuals(outputs=3)), ("control",)),
    Case("flux control batch 2 odd size", "flux", lambda: flux(2, 13, 9, control=residuals(2, 35, outputs=3)), ("control",)),
    Case("flux control of one for a batch", "flux", lambda: flux(batch=3, control=residuals(1, outputs=3)), ("control",)),
    Case("kontext control", "flux", lambda: flux(ref_latents=REFS, control=residuals(outputs=3)), ("control", "ref_latents")),
    Case("kontext control of part", "flux", lambda: flux(ref_latents=REFS, control=residuals(tokens=5, outputs=3)), ("control",)),
    Case("kontext offset", "flux", lambda: flux(ref_latents=REFS), ("ref_latents",)),
    Case("kontext index", "flux", lambda: flux(ref_latents=REFS, ref_latents_method="index"), ("ref_latents_method",)),
    Case("kontext uxo", "flux", lambda: flux(ref_latents=REFS, ref_latents_method="uxo"), ("ref_latents_method",)),
    Case("kontext batch 2", "flux", lambda: flux(batch=2, ref_latents=[normal(2, 16, 8, 6), normal(2, 16, 5, 7)]),
        ("ref_latents",)),
    Case("kontext timestep zero", "flux 2", lambda: flux_2(ref_latents=REFS_2[:1], ref_latents_method="index_timestep_zero"),
        ("ref_latents_method",)),
    Case("kontext timestep zero batch 2", "klein",
        lambda: flux_2(2, ref_latents=[r.repeat(2, 1, 1, 1) for r in REFS_2], ref_latents_method="index_timestep_zero"),
        ("ref_latents_method",)),
    Case("flux 2", "flux 2", flux_2),
    Case("flux 2 batch 2", "flux 2", lambda: flux_2(2)),
    Case("flux 2 reference", "flux 2", lambda: flux_2(ref_latents=REFS_2), ("ref_latents",)),
    Case("flux 2 control", "flux 2", lambda: flux_2(ref_latents=REFS_2, control=residuals(outputs=3)), ("control",)),
    Case("longcat", "longcat", lambda: flux(y=None, guidance=None), options={"rope_options": {"shift_t": 1.0, "shift_y": 7.0}}),
    Case("ovis batch 2", "ovis", lambda: flux(batch=2, y=None, guidance=None)),
]  # fmt: skip
POOLED = {"pooled_output": (1, 32)}
SERVED = [
    Served("flux", "flux", (16, 12, 10), 7, 48, {**POOLED, "guidance": 3.0}),
    Served("flux_kontext", "flux", (16, 9, 10), 7, 48, {**POOLED, "reference_latents": [(1, 16, 8, 6), (1, 16, 5, 7)]}),
    Served("flux_fill", "flux fill", (16, 12, 10), 7, 48, {**POOLED, "concat_latent_image": (1, 16, 12, 10)}),
    Served("flux_2", "flux 2", (128, 6, 5), 7, 48),
    Served("klein_timestep_zero", "klein", (128, 6, 5), 7, 48,
        {"reference_latents": [(1, 128, 4, 5)], "reference_latents_method": "index_timestep_zero"}),
    Served("flux_redux", "flux redux", (16, 12, 10), 7, 4096, POOLED),  # as wide as the tokens of its style model
    Served("ovis", "ovis", (16, 12, 10), 7, 48),
    Served("longcat", "longcat", (16, 12, 10), 7, 48),
    Served("longcat_edit", "longcat", (16, 9, 10), 7, 48, {"reference_latents": [(1, 16, 8, 6)]}),
]  # fmt: skip
