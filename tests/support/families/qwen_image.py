"""Qwen-Image, Edit and Layered."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, Model, Served, normal, text_mask

QWEN = dict(
    in_channels=64, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=48,
    axes_dims_rope=(16, 24, 24),
)  # fmt: skip

MODELS = {"qwen": Model("comfy.ldm.qwen_image.model.QwenImageTransformer2DModel", QWEN, "QwenImage", {"image_model": "qwen_image"})}


def qwen(batch: int = 1, height: int = 12, width: int = 10, text: int = 9, **extra: Any) -> dict[str, Any]:
    call = dict(x=normal(batch, 16, 1, height, width), timesteps=torch.linspace(0.3, 0.9, batch), context=normal(batch, text, 48))
    return {**call, **extra}


CASES = [
    Case("qwen", "qwen", qwen),
    Case("qwen text mask", "qwen", lambda: qwen(attention_mask=text_mask(1, 9)), ("attention_mask",)),
    Case("qwen text mask batch 2", "qwen", lambda: qwen(batch=2, text=7, attention_mask=text_mask(2, 7)), ("attention_mask",)),
    Case("qwen edit", "qwen", lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8), normal(1, 16, 1, 5, 4)])),
    Case(
        "qwen edit timestep zero",
        "qwen",
        lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8)], ref_latents_method="index_timestep_zero"),
    ),
    Case(
        "qwen edit mask batch 2",
        "qwen",
        lambda: qwen(batch=2, attention_mask=text_mask(2, 9), ref_latents=[normal(2, 16, 1, 6, 8)]),
        ("attention_mask",),
    ),
]
SERVED: list[Served] = []
