"""JoyImage, also with reference images."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, normal

JOY = dict(
    in_channels=16, hidden_size=96, patch_size=[1, 2, 2], num_layers=2, num_attention_heads=3, text_dim=48,
    rope_dim_list=[8, 12, 12], theta=10000,
)  # fmt: skip
MODELS = {"joyimage": Model("comfy.ldm.joyimage.model.JoyImageTransformer3DModel", JOY, "JoyImage", {"image_model": "joyimage"})}


def joyimage(batch: int = 1, frames: int = 1, height: int = 12, width: int = 10, text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 16, frames, height, width), timestep=torch.linspace(300.0, 900.0, batch),
        context=normal(batch, text, 48),
    ) | extra  # fmt: skip


def references(batch: int = 1) -> list[Tensor]:
    return [normal(batch, 16, 1, 8, 6, seed=5), normal(batch, 16, 1, 5, 7, seed=6)]


CASES = [
    Case("joyimage", "joyimage", joyimage),
    Case("joyimage odd size batch 2", "joyimage", lambda: joyimage(batch=2, height=11, width=9, text=5)),
    Case("joyimage one text token", "joyimage", lambda: joyimage(text=1)),
    Case("joyimage frames", "joyimage", lambda: joyimage(frames=3, height=7)),
    Case("joyimage references", "joyimage", lambda: joyimage(ref_latents=references()), ("ref_latents",)),
    Case("joyimage references batch 2", "joyimage", lambda: joyimage(batch=2, ref_latents=references(2)), ("ref_latents",)),
]
SERVED = [
    Served("joyimage", "joyimage", (16, 1, 12, 10), 7, 48, cfg=2.0),
    Served("joyimage-edit", "joyimage", (16, 1, 12, 10), 7, 48, {"reference_latents": [(1, 16, 1, 8, 6)]}),
]
