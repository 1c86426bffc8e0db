"""PixArt alpha and sigma."""

from typing import Any

import torch

from . import Case, Model, Served, denoise

PIXART = dict(
    num_heads=2, patch_size=2, hidden_size=96, in_channels=4, depth=2, caption_channels=48, model_max_length=9,
    micro_condition=False, pe_interpolation=2,
)  # fmt: skip
ALPHA = dict(PIXART, num_heads=3, micro_condition=True, qk_norm=True, pe_interpolation=1)
MODELS = {
    "sigma": Model("comfy.ldm.pixart.pixartms.PixArtMS", PIXART, "PixArtSigma", {"image_model": "pixart_sigma"}),
    "alpha": Model("comfy.ldm.pixart.pixartms.PixArtMS", ALPHA, "PixArtAlpha", {"image_model": "pixart_alpha"}),
}


def pixart(batch: int = 1, height: int = 64, width: int = 10, text: int = 9, **extra: Any) -> dict[str, Any]:
    """ComfyUI's positions need sides that add up to more than one patch of 64."""
    return denoise(batch, (4, height, width), text, time="timesteps", most=900.0) | extra


SIZE: dict[str, Any] = {"c_size": torch.tensor([[512.0, 300.0]]), "c_ar": torch.tensor([[1.7]])}
CASES = [
    Case("sigma", "sigma", pixart),
    Case("sigma batch 2 uneven", "sigma", lambda: pixart(batch=2, height=70, text=6)),
    Case("alpha", "alpha", pixart),
    Case("alpha size", "alpha", lambda: pixart(**SIZE), ("c_size", "c_ar")),
    Case("alpha batch 2", "alpha", lambda: pixart(batch=2, **{k: v.repeat(2, 1) for k, v in SIZE.items()}), ("c_size",)),
]
SERVED = [
    Served("pixart_sigma", "sigma", (4, 64, 10), 9, 48),
    Served("pixart_alpha", "alpha", (4, 64, 10), 9, 48, {"width": 512, "height": 300}),
]
