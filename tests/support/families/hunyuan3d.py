"""Hunyuan3D 2 and 2.1."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, normal

HUNYUAN_3D_2 = dict(
    in_channels=64, context_in_dim=48, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=2, depth_single_blocks=2, qkv_bias=True,
    guidance_embed=True,
)  # fmt: skip
# Layers above the middle one take what an earlier layer left; the last two are mixtures of experts.
HUNYUAN_3D_21 = dict(
    in_channels=64, hidden_size=96, context_dim=48, depth=5, num_heads=2, qk_norm=True, qkv_bias=False, num_moe_layers=2,
    guidance_cond_proj_dim=None, num_experts=4, moe_top_k=2,
)  # fmt: skip
UNET, UNET_21 = {"image_model": "hunyuan3d2"}, {"image_model": "hunyuan3d2_1"}
CLASS, CLASS_21 = "comfy.ldm.hunyuan3d.model.Hunyuan3Dv2", "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain"
MODELS = {
    "3d 2": Model(CLASS, HUNYUAN_3D_2, "Hunyuan3Dv2", UNET),
    "3d 2 mini": Model(CLASS, dict(HUNYUAN_3D_2, hidden_size=192, num_heads=3, guidance_embed=False), "Hunyuan3Dv2", UNET),
    "3d 2.1": Model(CLASS_21, HUNYUAN_3D_21, "Hunyuan3Dv2_1", UNET_21),
    "3d 2.1 3 heads": Model(CLASS_21, dict(HUNYUAN_3D_21, num_heads=3, norm_type="rms"), "Hunyuan3Dv2_1", UNET_21),
}


def shape(batch: int = 1, tokens: int = 40, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (64, tokens), text) | extra


def shape_21(batch: int = 1, tokens: int = 40, **extra: Any) -> dict[str, Any]:
    call = shape(batch, tokens)
    return {"x": call["x"], "t": call["timestep"], "context": call["context"], **extra}


def halves(batch: int) -> dict[str, Any]:
    """Both halves of CFG, each with the same latents."""
    return shape_21(2 * batch, x=normal(batch, 64, 40).repeat(2, 1, 1), t=torch.full((2 * batch,), 0.4))


CASES = [
    Case("3d 2", "3d 2", lambda: shape(guidance=torch.full((1,), 5.0)), ("guidance",)),
    Case("3d 2 batch 2 odd size", "3d 2", lambda: shape(batch=2, tokens=41, text=5)),
    Case("3d 2 mini", "3d 2 mini", shape),
    Case("3d 2 mini batch 2", "3d 2 mini", lambda: shape(batch=2, text=1)),
    Case("3d 2.1", "3d 2.1", shape_21),
    Case("3d 2.1 odd size", "3d 2.1", lambda: shape_21(tokens=41)),
    Case("3d 2.1 3 heads", "3d 2.1 3 heads", lambda: shape_21(tokens=42)),
    # The model swaps the halves of the text and of the output: alike for CFG, whose halves have the same latents.
    Case("3d 2.1 cfg", "3d 2.1", lambda: halves(1), options={"cond_or_uncond": [1, 0]}),
    Case("3d 2.1 cfg batch 2", "3d 2.1", lambda: halves(2), options={"cond_or_uncond": [1, 0]}),
    Case("3d 2.1 batch 3", "3d 2.1 3 heads", lambda: shape_21(batch=3)),
]
SERVED = [Served("hunyuan3d_2", "3d 2", (64, 40), 7, 48, {"guidance": 5.0}), Served("hunyuan3d_21", "3d 2.1", (64, 40), 7, 48)]
