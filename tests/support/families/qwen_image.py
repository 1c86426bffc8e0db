"""Qwen-Image, Edit and Layered."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, normal, text_mask

QWEN = dict(
    in_channels=64, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=48,
    axes_dims_rope=(16, 24, 24),
)  # fmt: skip

CLASS = "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel"
MODELS = {
    "qwen": Model(CLASS, QWEN, "QwenImage", {"image_model": "qwen_image"}),
    "qwen layered": Model(CLASS, dict(QWEN, num_attention_heads=3, use_additional_t_cond=True, default_ref_method="negative_index"),
        "QwenImage", {"image_model": "qwen_image"}),
}  # fmt: skip


def qwen(batch: int = 1, height: int = 12, width: int = 10, text: int = 9, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (16, 1, height, width), text, time="timesteps") | extra


CASES = [
    Case("qwen", "qwen", qwen),
    Case("qwen odd size batch 2", "qwen", lambda: qwen(batch=2, height=11, width=9, text=5)),
    Case("qwen text mask", "qwen", lambda: qwen(attention_mask=text_mask(1, 9)), ("attention_mask",)),
    Case("qwen text mask batch 2", "qwen", lambda: qwen(batch=2, text=7, attention_mask=text_mask(2, 7)), ("attention_mask",)),
    Case("qwen edit", "qwen", lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8), normal(1, 16, 1, 5, 4)])),
    Case("qwen edit timestep zero", "qwen",
        lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8)], ref_latents_method="index_timestep_zero")),
    Case("qwen edit mask batch 2", "qwen",
        lambda: qwen(batch=2, attention_mask=text_mask(2, 9), ref_latents=[normal(2, 16, 1, 6, 8)]), ("attention_mask",)),
    Case("qwen edit offset", "qwen", lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8)] * 2, ref_latents_method="offset")),
    Case("qwen layered", "qwen layered", lambda: qwen(
        x=normal(1, 16, 3, 7, 10), ref_latents=[normal(1, 16, 1, 7, 10, seed=1)],
        additional_t_cond=torch.ones(1, dtype=torch.long),
    ), ("ref_latents", "additional_t_cond")),
    Case("qwen layered batch 2", "qwen layered",
        lambda: qwen(batch=2, x=normal(2, 16, 3, 7, 10), ref_latents=[normal(2, 16, 1, 7, 10, seed=1)]), ("ref_latents",)),
    Case("qwen residuals", "qwen", lambda: qwen(control={"input": [normal(1, 30, 128, seed=1), None]}), ("control",)),
    # No residual for the references behind the image.
    Case("qwen edit residuals", "qwen",
        lambda: qwen(ref_latents=[normal(1, 16, 1, 6, 8)], control={"input": [None, normal(1, 30, 128, seed=1)]}), ("control",)),
]  # fmt: skip
MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]])
SERVED = [
    Served("qwen", "qwen", (16, 1, 9, 10), 9, 48),
    Served("qwen mask", "qwen", (16, 1, 8, 6), 9, 48, {"attention_mask": MASK}),
    Served("qwen edit", "qwen", (16, 1, 8, 10), 9, 48, {"reference_latents": [(1, 16, 1, 6, 8), (1, 16, 1, 5, 4)]}),
]
