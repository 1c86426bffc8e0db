"""UNets: Stable Diffusion 1.5, XL and its refiner, 2 (as Lotus has it), Stable Video Diffusion. Only the batch is shared."""

from typing import Any

import torch

from . import Case, Model, Served, fan_in, normal

UNET = dict(
    image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[1, 1], channel_mult=[1, 2],
    transformer_depth=[1, 1], transformer_depth_middle=1, transformer_depth_output=[1, 1, 1, 1], use_spatial_transformer=True,
    legacy=False, context_dim=32, num_heads=4, use_checkpoint=False,
)  # fmt: skip
SD15 = dict(UNET, use_linear_in_transformer=False, adm_in_channels=None)
BENCH = dict(
    SD15, model_channels=64, num_res_blocks=[2, 2], transformer_depth=[1] * 4, transformer_depth_output=[1] * 6, context_dim=64,
)  # fmt: skip
SD2 = dict(SD15, use_linear_in_transformer=True, num_heads=-1, num_head_channels=16)
LOTUS = dict(SD2, context_dim=1024)  # as wide as the text that its conditioning node holds
SDXL = dict(
    UNET, use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=1552, num_head_channels=16, num_heads=-1,
    transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1],
)  # fmt: skip
SVD = dict(
    UNET, in_channels=8, use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=768, num_head_channels=16,
    num_heads=-1, use_temporal_attention=True, use_temporal_resblock=True, extra_ff_mix_layer=True, use_spatial_context=True,
    merge_strategy="learned_with_images", merge_factor=0.0, video_kernel_size=[3, 1, 1],
)  # fmt: skip


CLASS = "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel"
MODELS = {
    "sd15": Model(CLASS, SD15, "SD15", init=fan_in),
    "sd2": Model(CLASS, SD2, "SD20", init=fan_in),
    "lotus": Model(CLASS, LOTUS, "SD20", init=fan_in),
    "sdxl": Model(CLASS, SDXL, "SDXL", init=fan_in),
    "sdxl unclip": Model(CLASS, dict(SDXL, adm_in_channels=1536 + 1280), "SDXL", init=fan_in),
    "sdxl refiner": Model(CLASS, dict(SDXL, adm_in_channels=1280 + 16), "SDXLRefiner", init=fan_in),
    "bench": Model(CLASS, BENCH, "SD15", init=fan_in),
    "svd": Model(CLASS, SVD, "SVD_img2vid", init=fan_in),
}  # fmt: skip


def sd15(batch: int = 2, **extra: Any) -> dict[str, Any]:
    return dict(x=normal(batch, 4, 8, 12), timesteps=torch.linspace(100.0, 900.0, batch), context=normal(batch, 7, 32)) | extra


def sdxl(batch: int = 2, **extra: Any) -> dict[str, Any]:
    return {**sd15(batch), "y": normal(batch, 1552), **extra}


def svd(videos: int = 2, frames: int = 3) -> dict[str, Any]:
    batch = videos * frames
    return {
        "x": normal(batch, 8, 8, 8), "timesteps": torch.full((batch,), 300.0), "context": normal(batch, 1, 32),
        "y": normal(batch, 768), "num_video_frames": frames,
    }  # fmt: skip


def residuals(batch: int) -> dict[str, Any]:
    shapes = [(32, 8, 12), (32, 8, 12), (32, 4, 6), (64, 4, 6)]
    outputs = [normal(batch, *shape, seed=i) for i, shape in enumerate(shapes)]
    return {"output": [outputs[0], None, outputs[2], outputs[3]], "middle": [normal(batch, 64, 4, 6)], "input": []}


CASES = [
    Case("sd15", "sd15", sd15),
    Case("sd15 batch 4", "sd15", lambda: sd15(4)),
    Case("sd15 residuals", "sd15", lambda: sd15(control=residuals(2)), ("control",)),
    Case("sdxl", "sdxl", sdxl),
    Case("sdxl residuals batch 4", "sdxl", lambda: sdxl(4, control=residuals(4)), ("control",)),
    Case("svd", "svd", svd),
]
SERVED = [
    Served("sd15", "sd15", (4, 8, 12), 7, 32),
    Served("sd2", "sd2", (4, 8, 8), 7, 32),
    Served("unet-bench", "bench", (4, 8, 8), 7, 64),  # larger, for benchmarks
    Served("sdxl", "sdxl", (4, 8, 12), 7, 32, {"pooled_output": (1, 16)}),
    Served("sdxl_unclip", "sdxl unclip", (4, 8, 12), 7, 32, {"pooled_output": (1, 1280)}),
    Served("sdxl_refiner", "sdxl refiner", (4, 8, 12), 7, 32, {"pooled_output": (1, 16)}),
    Served("sd2_lotus", "lotus", (4, 8, 8), 7, 1024, batch=2),
    # A batch is the frames of one video.
    Served("svd", "svd", (4, 8, 8), 1, 32, {"concat_latent_image": (1, 4, 8, 8)}, batch=3),
]
