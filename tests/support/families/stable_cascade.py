"""Stable Cascade: stage C, with its ControlNet, and stage B. Only the batch is shared."""

from typing import Any

import torch

from . import Case, Model, Served, fan_in, normal

STAGE_C = dict(
    c_cond=64, c_hidden=[64, 64], nhead=[2, 4], blocks=[[1, 2], [2, 1]], c_clip_text=48, c_clip_text_pooled=32,
)  # fmt: skip
STAGE_B = dict(
    c_cond=64, c_hidden=[32, 64], nhead=[-1, 2], blocks=[[1, 1], [1, 1]], block_repeat=[[1, 1], [2, 1]], c_clip=32,
    level_config=["CT", "CTA"], dropout=[0.0, 0.0],
)  # fmt: skip


MODELS = {
    "stage c": Model("comfy.ldm.cascade.stage_c.StageC", STAGE_C, "Stable_Cascade_C", {"stable_cascade_stage": "c"}, fan_in),
    "stage b": Model("comfy.ldm.cascade.stage_b.StageB", STAGE_B, "Stable_Cascade_B", {"stable_cascade_stage": "b"}, fan_in),
}


def stage_c(batch: int = 2, **extra: Any) -> dict[str, Any]:
    return dict(
        x=normal(batch, 16, 6, 7), r=torch.linspace(0.2, 0.9, batch), clip_text=normal(batch, 7, 48),
        clip_text_pooled=normal(batch, 1, 32), clip_img=normal(batch, 1, 768), sca=torch.zeros(batch), crp=torch.zeros(batch),
    ) | extra  # fmt: skip


def stage_b(batch: int = 2, **extra: Any) -> dict[str, Any]:
    return dict(
        x=normal(batch, 4, 12, 14), r=torch.linspace(0.2, 0.9, batch), effnet=normal(batch, 16, 5, 6), clip=normal(batch, 1, 32),
        sca=torch.zeros(batch),
    ) | extra  # fmt: skip


def residuals(batch: int) -> dict[str, Any]:
    """Taken from the end, one per convolution block."""
    return {"input": [None, normal(batch, 64, 3, 4), None, normal(batch, 64, 6, 7), None, normal(batch, 64, 3, 4, seed=1)]}


CASES = [
    Case("stage c", "stage c", stage_c),
    Case("stage c batch 4", "stage c", lambda: stage_c(4)),
    Case("stage c residuals", "stage c", lambda: stage_c(control=residuals(2)), ("control",)),
    Case("stage b", "stage b", stage_b),
    Case("stage b batch 4", "stage b", lambda: stage_b(4)),
]
SERVED = [
    Served("stage_c", "stage c", (16, 6, 7), 7, 48, {"pooled_output": (1, 32)}),
    Served("stage_b", "stage b", (4, 12, 14), 7, 48, {"pooled_output": (1, 32), "stable_cascade_prior": (1, 16, 5, 6)}),
]
