"""Cosmos Predict2: text to image, image to video."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, normal

PREDICT2 = dict(
    max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
    model_channels=144, num_blocks=2, num_heads=3, concat_padding_mask=True, crossattn_emb_channels=48, pos_emb_cls="rope3d",
    pos_emb_learnable=True, pos_emb_interpolation="crop", min_fps=1, max_fps=30, use_adaln_lora=True, adaln_lora_dim=16,
    extra_per_block_abs_pos_emb=False, rope_h_extrapolation_ratio=4.0, rope_w_extrapolation_ratio=4.0,
    rope_t_extrapolation_ratio=1.0, extra_h_extrapolation_ratio=1.0, extra_w_extrapolation_ratio=1.0,
    extra_t_extrapolation_ratio=1.0, rope_enable_fps_modulation=False,
)  # fmt: skip
VIDEO = dict(PREDICT2, in_channels=17, extra_per_block_abs_pos_emb=True, rope_enable_fps_modulation=True)
CLS = "comfy.ldm.cosmos.predict2.MiniTrainDIT"
MODELS = {
    "cosmos predict2": Model(CLS, PREDICT2, "CosmosT2IPredict2", {"image_model": "cosmos_predict2"}),
    "cosmos predict2 video": Model(CLS, VIDEO, "CosmosI2VPredict2", {"image_model": "cosmos_predict2"}),
    "cosmos predict2 plain": Model(CLS, dict(PREDICT2, use_adaln_lora=False, patch_temporal=2), "CosmosT2IPredict2",
        {"image_model": "cosmos_predict2"}),
}  # fmt: skip


def predict2(
    batch: int = 1, frames: int = 1, height: int = 8, width: int = 10, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, time="timesteps") | extra


def video(frames: int = 3, **extra: Any) -> dict[str, Any]:
    return predict2(frames=frames, channels=17, **extra)


CASES = [
    Case("predict2", "cosmos predict2", predict2),
    Case("predict2 batch 2 odd", "cosmos predict2", lambda: predict2(batch=2, height=7, width=9, text=5)),
    Case("predict2 3 frames", "cosmos predict2", lambda: predict2(frames=3)),
    Case("predict2 2 tokens a frame", "cosmos predict2", lambda: predict2(frames=3, height=2, width=4)),
    Case("predict2 padding mask", "cosmos predict2", lambda: predict2(padding_mask=normal(1, 1, 16, 20)), ("padding_mask",)),
    Case("predict2 plain", "cosmos predict2 plain", lambda: predict2(frames=5)),
    Case("predict2 video", "cosmos predict2 video", video),
    Case("predict2 video batch 2 odd", "cosmos predict2 video", lambda: video(batch=2, frames=2, height=7, width=9)),
    Case("predict2 video fps", "cosmos predict2 video", lambda: video(fps=torch.tensor([12.0])), ("fps",)),
    Case("predict2 video per-frame timesteps", "cosmos predict2 video", lambda: video(timesteps=torch.tensor([[0.0, 0.4, 0.9]]))),
    Case("predict2 video per-frame timesteps batch 2", "cosmos predict2 video",
        lambda: video(batch=2, height=7, width=9, timesteps=torch.tensor([[0.0, 0.4, 0.9], [0.1, 0.2, 0.3]]))),
]  # fmt: skip
SERVED = [
    Served("cosmos predict2", "cosmos predict2", (16, 1, 16, 16), 12, 48),
    Served("cosmos predict2 video", "cosmos predict2 video", (16, 3, 8, 8), 12, 48, {"frame_rate": 12}),
]
