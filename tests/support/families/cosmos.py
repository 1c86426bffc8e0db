"""Cosmos 1: text and image to video."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

COSMOS = dict(
    max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
    block_config="FA-CA-MLP", model_channels=144, num_blocks=2, num_heads=3, block_x_format="THWBD", crossattn_emb_channels=48,
    pos_emb_cls="rope3d", pos_emb_learnable=False, pos_emb_interpolation="crop", affline_emb_norm=True, use_adaln_lora=True,
    adaln_lora_dim=16, rope_h_extrapolation_ratio=1.0, rope_w_extrapolation_ratio=1.0, rope_t_extrapolation_ratio=2.0,
    extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable", extra_h_extrapolation_ratio=1.0,
    extra_w_extrapolation_ratio=1.0, extra_t_extrapolation_ratio=2.0, concat_padding_mask=True,
)  # fmt: skip
CLS = "comfy.ldm.cosmos.model.GeneralDIT"


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Norms of queries and keys, which are not called norms."""
    return 1.5 + 0.1 * values if name.endswith(("to_q.1.weight", "to_k.1.weight")) else None


MODELS = {
    "cosmos": Model(CLS, COSMOS, "CosmosT2V", {"image_model": "cosmos"}, init),
    "cosmos i2v": Model(CLS, dict(COSMOS, in_channels=17), "CosmosI2V", {"image_model": "cosmos"}, init),
}


def cosmos(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, time="timesteps") | extra


CASES = [
    Case("cosmos", "cosmos", cosmos),
    Case("cosmos batch 2 odd", "cosmos", lambda: cosmos(batch=2, frames=2, height=6, width=14, text=5)),
    Case("cosmos one frame", "cosmos", lambda: cosmos(frames=1)),
    Case("cosmos 2 tokens a frame", "cosmos", lambda: cosmos(height=2, width=4)),
    Case("cosmos fps", "cosmos", lambda: cosmos(frames=4, fps=torch.tensor([1.0])), ("fps",)),
    Case("cosmos padding mask", "cosmos", lambda: cosmos(padding_mask=normal(1, 1, 16, 20)), ("padding_mask",)),
    Case("cosmos i2v", "cosmos i2v", lambda: cosmos(channels=17)),
]
SERVED = [
    Served("cosmos", "cosmos", (16, 3, 8, 8), 12, 48, {"frame_rate": 12}),
    Served("cosmos i2v", "cosmos i2v", (16, 3, 8, 8), 12, 48),
]
