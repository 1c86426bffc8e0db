"""Wan 2.1 and 2.2: text and image to video, 5B."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, Model, Served, normal

WAN = dict(
    model_type="t2v", dim=96, out_dim=16, num_heads=4, ffn_dim=128, num_layers=2, patch_size=(1, 2, 2), freq_dim=64, in_dim=16,
    text_dim=48,
)  # fmt: skip
MODELS = {
    "wan t2v": Model("comfy.ldm.wan.model.WanModel", WAN, "WAN21_T2V", {"image_model": "wan2.1"}),
    "wan i2v": Model(
        "comfy.ldm.wan.model.WanModel", dict(WAN, model_type="i2v", in_dim=36), "WAN21_I2V", {"image_model": "wan2.1"}
    ),
    "wan ref": Model("comfy.ldm.wan.model.WanModel", dict(WAN, in_dim_ref_conv=16), "WAN21_T2V", {"image_model": "wan2.1"}),
}


def wan(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    call = dict(
        x=normal(batch, channels, frames, height, width),
        timestep=torch.linspace(300.0, 900.0, batch),
        context=normal(batch, text, 48),
    )
    return {**call, **extra}


CASES = [
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
]
SERVED: list[Served] = []
