"""SeedVR2, whose forward exchanges the halves of CFG."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.seedvr.model.NaDiT"
SEEDVR2 = dict(
    norm_eps=1e-5, num_layers=4, mlp_type="swiglu", vid_dim=96, txt_in_dim=48, heads=3, head_dim=32, mm_layers=2, rope_dim=32,
    vid_out_norm="fusedrms",
)  # fmt: skip


def init(name: str, tensor: Tensor, values: Tensor) -> Tensor | None:
    """Random texts in the file; gates that let blocks through."""
    if name.endswith("_conditioning"):
        return values
    return 1.0 + 0.2 * values if name.endswith(("_gate", "_scale")) else None


def model(**arguments: Any) -> Model:
    return Model(CLASS, {**SEEDVR2, **arguments}, "SeedVR2", {"image_model": "seedvr2"}, init)


MODELS = {
    "seedvr2": model(),
    "seedvr2 text": model(txt_in_dim=5120, num_layers=2),
    "seedvr2 one rotary": model(mlp_type="normal", rope_type="rope3d", vid_out_norm=None, heads=2, vid_dim=64),
}
ONE, BOTH = {"cond_or_uncond": [0]}, {"cond_or_uncond": [1, 0]}


def seedvr2(batch: int = 1, frames: int = 5, height: int = 8, width: int = 10, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(
        batch, (16, frames, height, width), text, most=900.0, condition=normal(batch, 17, frames, height, width, seed=1),
    ) | extra  # fmt: skip


CASES = [
    Case("seedvr2", "seedvr2", seedvr2, options=ONE),
    Case("seedvr2 batch 2", "seedvr2", lambda: seedvr2(2, frames=3, height=6, width=6, text=5), options=ONE),
    Case("seedvr2 batch 3", "seedvr2", lambda: seedvr2(3, frames=3, height=6, width=6), options=ONE),
    Case("seedvr2 two tokens, batch 2", "seedvr2", lambda: seedvr2(2, frames=1, height=2, width=2), options=ONE),
    Case("seedvr2 both halves", "seedvr2", lambda: seedvr2(2, frames=3), options=BOTH),
    Case("seedvr2 both halves of 2", "seedvr2", lambda: seedvr2(4, frames=3, height=6, width=6), options=BOTH),
    Case("seedvr2 own text", "seedvr2 text", lambda: seedvr2(context=torch.empty(0)), options=ONE),
    Case("seedvr2 one rotary", "seedvr2 one rotary", seedvr2, options=ONE),
]
SERVED = [
    Served("seedvr2", "seedvr2", (16, 5, 8, 10), 7, 48, {"condition": (1, 17, 5, 8, 10)}),
    # As wide as the texts that its file holds.
    Served("seedvr2 text", "seedvr2 text", (16, 5, 8, 10), 58, 5120, {"condition": (1, 17, 5, 8, 10)}),
]
