"""Mage-Flow, also with reference images."""

from typing import Any

import torch

from . import Case, Model, Served, normal, text_mask

MAGE = dict(
    in_channels=128, num_layers=2, num_attention_heads=3, attention_head_dim=32, axes_dims_rope=(8, 12, 12), joint_attention_dim=48
)
MODELS = {
    "mage flow": Model("comfy.ldm.mage_flow.model.MageFlowTransformer2DModel", MAGE, "MageFlow", {"image_model": "mage_flow"})
}


def mage(batch: int = 1, height: int = 6, width: int = 5, text: int = 8, **extra: Any) -> dict[str, Any]:
    # The model's timesteps are rounded to bfloat16.
    return dict(
        x=normal(batch, 128, height, width), timestep=torch.linspace(0.3, 0.9, batch).bfloat16(), context=normal(batch, text, 48),
    ) | extra  # fmt: skip


REFS = [normal(1, 128, 4, 3), normal(1, 128, 3, 5, seed=1)]
CASES = [
    Case("mage flow", "mage flow", mage),
    Case("mage flow odd size batch 2", "mage flow", lambda: mage(batch=2, height=7, width=5, text=5)),
    Case("mage flow one text token", "mage flow", lambda: mage(text=1)),
    Case("mage flow text mask", "mage flow", lambda: mage(attention_mask=text_mask(1, 8)), ("attention_mask",)),
    Case("mage flow text mask batch 2", "mage flow", lambda: mage(batch=2, attention_mask=text_mask(2, 8)), ("attention_mask",)),
    Case("mage flow edit", "mage flow", lambda: mage(ref_latents=REFS), ("ref_latents",)),
    # No residual for the references behind the image.
    Case("mage flow residuals and references", "mage flow",
        lambda: mage(ref_latents=REFS, control={"input": [normal(1, 30, 96, seed=1), None]}), ("control",)),
]  # fmt: skip
SERVED = [
    Served("mage-flow", "mage flow", (128, 6, 5), 8, 48, cfg=2.0),
    Served("mage-flow-edit", "mage flow", (128, 6, 5), 8, 48,
        {"attention_mask": text_mask(1, 8), "reference_latents": [(1, 128, 4, 3)]}),
]  # fmt: skip
