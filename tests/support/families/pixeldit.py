"""PixelDiT and PiD."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

PIXELDIT = dict(
    in_channels=3, num_groups=3, hidden_size=96, pixel_hidden_size=16, pixel_attn_hidden_size=96, pixel_num_groups=3, patch_depth=2,
    pixel_depth=2, patch_size=4, txt_embed_dim=48, txt_max_length=20,
)  # fmt: skip
PID = dict(
    PIXELDIT, patch_depth=3, lq_latent_channels=4, lq_hidden_dim=16, lq_num_res_blocks=1, sr_scale=1, latent_spatial_down_factor=4,
    rope_ref_h=16, rope_ref_w=16,
)  # fmt: skip
PID_15 = dict(
    PID, lq_latent_channels=16, latent_spatial_down_factor=8, lq_latent_unpatchify_factor=2, lq_conv_padding_mode="replicate",
    lq_gate_per_token=True, pit_lq_inject=True, lq_interval=1,
)  # fmt: skip


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Usual sizes: modulation is multiplied into values that it makes, and convolutions have many inputs."""
    if "adaLN_modulation" in name:
        return values * 0.02 if parameter.ndim > 1 else 0.5 + 0.2 * values
    if parameter.ndim == 4:
        return values / parameter[0].numel() ** 0.5
    if "norm" in name and parameter.ndim == 1:
        return 1.0 + 0.1 * values
    return None


T2I, NET = "comfy.ldm.pixeldit.model.PixDiT_T2I", "comfy.ldm.pixeldit.pid.PidNet"
MODELS = {
    "pixeldit": Model(T2I, PIXELDIT, "PixelDiTT2I", {"image_model": "pixeldit_t2i"}, init),
    "pixeldit no text rope": Model(T2I, dict(PIXELDIT, use_text_rope=False), "PixelDiTT2I", {"image_model": "pixeldit_t2i"}, init),
    "pid": Model(NET, PID, "PiD", {"image_model": "pid"}, init),
    "pid 1.5": Model(NET, PID_15, "PiD", {"image_model": "pid"}, init),
}


def pixeldit(batch: int = 1, height: int = 20, width: int = 24, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (3, height, width), text, time="timesteps", most=900.0) | extra


def pid(batch: int = 1, height: int = 20, width: int = 24, channels: int = 4, scale: int = 4, **extra: Any) -> dict[str, Any]:
    latent = normal(batch, channels, -(-height // scale), -(-width // scale))
    return pixeldit(batch, height, width, lq_latent=latent, degrade_sigma=torch.full((batch,), 0.3), **extra)


ROPE = {"rope_options": {"scale_x": 1.5, "shift_y": 2.0}}
CASES = [
    Case("pixeldit", "pixeldit", pixeldit),
    Case("pixeldit batch 2 odd", "pixeldit", lambda: pixeldit(batch=2, height=19, width=14, text=5)),
    Case("pixeldit one token each", "pixeldit", lambda: pixeldit(height=4, width=4, text=1)),
    Case("pixeldit long text", "pixeldit", lambda: pixeldit(text=25)),
    Case("pixeldit rope options", "pixeldit", pixeldit, options=ROPE),
    Case("pixeldit no text rope", "pixeldit no text rope", pixeldit),
    Case("pid", "pid", pid),
    Case("pid batch 2 odd", "pid", lambda: pid(batch=2, height=19, width=14)),
    Case("pid 1.5", "pid 1.5", lambda: pid(channels=16, scale=8)),
    Case("pid 1.5 batch 2 odd", "pid 1.5", lambda: pid(batch=2, height=19, width=14, channels=16, scale=8)),
]
SERVED = [
    Served("pixeldit", "pixeldit", (3, 32, 32), 12, 48),
    Served("pid", "pid", (3, 32, 32), 12, 48, {"lq_latent": (1, 4, 8, 8), "degrade_sigma": torch.tensor([0.3])}),
]
