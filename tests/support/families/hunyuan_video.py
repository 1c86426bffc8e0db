"""HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, normal, residuals, text_mask

VIDEO = dict(
    in_channels=16, out_channels=16, patch_size=[1, 2, 2], vec_in_dim=32, context_in_dim=48, hidden_size=128, mlp_ratio=2.0,
    num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[16, 24, 24], theta=256, qkv_bias=True, guidance_embed=True, byt5=False,
    meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
)  # fmt: skip
VIDEO_15 = dict(
    VIDEO, in_channels=65, out_channels=32, patch_size=[1, 1, 1], vec_in_dim=None, hidden_size=96, num_heads=3, depth=3,
    depth_single_blocks=0, axes_dim=[8, 12, 12], guidance_embed=False, byt5=True, use_cond_type_embedding=True, vision_in_dim=40,
    meanflow_sum=True,
)  # fmt: skip
IMAGE = dict(
    VIDEO, in_channels=64, out_channels=64, patch_size=[1, 1], vec_in_dim=None, axes_dim=[32, 32], guidance_embed=True, byt5=True,
    meanflow=True,
)  # fmt: skip
REFINER = dict(IMAGE, in_channels=128, patch_size=[1, 1, 1], axes_dim=[16, 24, 24], byt5=False)


MODULE = "comfy.ldm.hunyuan_video.model"
GLYPHS = 40
# Widths of what takes the glyphs of a text.
SIZES = {MODULE: {1472: GLYPHS, 2048: 72}}


def model(arguments: dict[str, Any], config: str) -> Model:
    return Model(MODULE + ".HunyuanVideo", arguments, config, {"image_model": "hunyuan_video"}, sizes=SIZES)


MODELS = {
    "video": model(VIDEO, "HunyuanVideo"),
    "video i2v": model(dict(VIDEO, in_channels=33, guidance_embed=False), "HunyuanVideoI2V"),
    "video 1.5": model(VIDEO_15, "HunyuanVideo15"),
    "video 1.5 sr": model(dict(VIDEO_15, in_channels=98, meanflow=True), "HunyuanVideo15_SR_Distilled"),
    "image": model(IMAGE, "HunyuanImage21"),
    "image refiner": model(REFINER, "HunyuanImage21Refiner"),
}


def video(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 7, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(
        batch, (channels, frames, height, width), text, most=900.0, y=normal(batch, 32), guidance=torch.full((batch,), 6.0),
    ) | extra  # fmt: skip


def video_15(batch: int = 1, frames: int = 3, height: int = 4, width: int = 5, channels: int = 65, **extra: Any) -> dict[str, Any]:
    return {**video(batch, frames, height, width, channels=channels), "y": None, "guidance": None, **extra}


def image(batch: int = 1, height: int = 6, width: int = 6, **extra: Any) -> dict[str, Any]:
    return {**video(batch, 1, channels=64), "x": normal(batch, 64, height, width), "y": None, **extra}


def reference(batch: int = 1, height: int = 8, width: int = 10) -> dict[str, Any]:
    return {"ref_latent": normal(batch, 16, 1, height, width, seed=4)}


def guide(batch: int = 1) -> dict[str, Any]:
    return {"guiding_frame_index": torch.zeros(batch)}


BYT5: dict[str, Any] = {"txt_byt5": normal(1, 5, GLYPHS)}
VISION: dict[str, Any] = {"clip_fea": normal(1, 4, 40)}
# The second of three steps; meanflow also looks at the next one.
STEPS = {"sigmas": torch.tensor([0.6]), "sample_sigmas": torch.tensor([0.9, 0.6, 0.2])}
CASES = [
    Case("video", "video", video),
    Case("video batch 2 odd frames", "video", lambda: video(batch=2, frames=5, height=6, width=6, text=5)),
    Case("video one frame", "video", lambda: video(frames=1)),
    Case("video one text token", "video", lambda: video(text=1)),
    Case("video no guidance", "video", lambda: video(guidance=None)),
    Case("video i2v", "video i2v", lambda: video(channels=33)),
    Case("video text mask", "video", lambda: video(attention_mask=text_mask(1, 7)), ("attention_mask",)),
    Case("video additive text mask", "video", lambda: video(attention_mask=2 * normal(1, 7)), ("attention_mask",)),
    Case("video guiding frame", "video", lambda: video(**guide()), ("guiding_frame_index",)),
    Case("video guiding frame batch 2", "video", lambda: video(batch=2, width=6, text=12, **guide(2)), ("guiding_frame_index",)),
    Case("video reference", "video", lambda: video(**reference()), ("ref_latent",)),
    Case("video reference of one token", "video", lambda: video(**reference(1, 2, 2)), ("ref_latent",)),
    # ComfyUI takes a reference, or a text mask, for one video at a time only; a guiding frame beside guidance, for one or two.
    Case("video reference mask guiding frame", "video", lambda: video(attention_mask=text_mask(1, 7), **reference(), **guide()),
        ("ref_latent", "guiding_frame_index", "attention_mask")),
    Case("video control", "video", lambda: video(control=residuals(1, 60)), ("control",)),
    Case("video control reference", "video", lambda: video(control=residuals(1, 80), **reference()), ("control",)),
    Case("video 1.5", "video 1.5", video_15),
    Case("video 1.5 batch 2", "video 1.5", lambda: video_15(batch=2, frames=1)),
    Case("video 1.5 mask", "video 1.5", lambda: video_15(attention_mask=text_mask(1, 7)), ("attention_mask",)),
    Case("video 1.5 byt5 vision", "video 1.5", lambda: video_15(**BYT5, **VISION), ("txt_byt5", "clip_fea")),
    Case("video 1.5 guiding frame", "video 1.5", lambda: video_15(**guide(), **VISION), ("guiding_frame_index",)),
    Case("video 1.5 sr", "video 1.5 sr", lambda: video_15(channels=98, **VISION), options=STEPS),
    Case("video 1.5 sr batch 2", "video 1.5 sr", lambda: video_15(2, channels=98, disable_time_r=True), ("disable_time_r",),
        options=STEPS),
    Case("image", "image", image, options=STEPS),
    Case("image odd size", "image", lambda: image(height=5, width=7), options=STEPS),
    Case("image byt5", "image", lambda: image(**BYT5), ("txt_byt5",), options=STEPS),
    Case("image batch 2", "image", lambda: image(batch=2, txt_byt5=normal(2, 5, GLYPHS)), ("txt_byt5",), options=STEPS),
    Case("image mask", "image", lambda: image(attention_mask=text_mask(1, 7)), ("attention_mask",), options=STEPS),
    Case("image refiner", "image refiner", lambda: video_15(channels=128, disable_time_r=True)),
]  # fmt: skip
POOLED = {"pooled_output": (1, 32)}
SERVED = [
    Served("hunyuan_video", "video", (16, 3, 8, 10), 7, 48, {**POOLED, "guidance": 6.0}),
    Served("hunyuan_video_i2v", "video i2v", (16, 3, 8, 10), 7, 48, {**POOLED, "guiding_frame_index": 0, "guidance": None}),
    Served("hunyuan_video_15", "video 1.5", (32, 3, 4, 5), 7, 48,
        {**POOLED, "conditioning_byt5small": (1, 5, GLYPHS), "clip_vision_output": (1, 4, 40)}),
    Served("hunyuan_video_15_sr", "video 1.5 sr", (32, 3, 4, 5), 7, 48, POOLED),
    Served("hunyuan_image_21", "image", (64, 6, 5), 7, 48, {"conditioning_byt5small": (1, 5, GLYPHS)}),
]  # fmt: skip
