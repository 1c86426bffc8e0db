"""OmniGen2 and Boogu, with reference images."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

OMNIGEN = dict(
    axes_dim_rope=[8, 12, 12], axes_lens=[1024, 1664, 1664], hidden_size=96, in_channels=16, multiple_of=32, num_attention_heads=3,
    num_kv_heads=1, num_layers=2, num_refiner_layers=2, patch_size=2, text_feat_dim=48, timestep_scale=1000.0,
)  # fmt: skip
BOOGU = dict(
    axes_dim_rope=[8, 12, 12], axes_lens=[2048, 1664, 1664], hidden_size=128, in_channels=16, multiple_of=32,
    num_attention_heads=4, num_kv_heads=2, num_layers=2, num_double_stream_layers=2, num_refiner_layers=2, patch_size=2,
    instruction_feat_dim=48, timestep_scale=1000.0,
)  # fmt: skip


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Scores of a usual size: sharp attention makes noise of rounding."""
    return 0.8 + 0.1 * values if name.endswith((".norm_q.weight", ".norm_k.weight")) else None


MODELS = {
    "omnigen2": Model("comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel", OMNIGEN, "Omnigen2", {"image_model": "omnigen2"},
        init),
    "boogu": Model("comfy.ldm.boogu.model.BooguTransformer2DModel", BOOGU, "Boogu", {"image_model": "boogu"}, init),
}  # fmt: skip


def omnigen2(batch: int = 1, height: int = 12, width: int = 10, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (16, height, width), text, time="timesteps", num_tokens=text) | extra


def references(batch: int = 1) -> list[Tensor]:
    return [normal(batch, 16, 8, 6, seed=5), normal(batch, 16, 5, 7, seed=6)]


CASES = [
    case
    for model in ("omnigen2", "boogu")
    for case in (
        Case(model, model, omnigen2),
        Case(f"{model} odd size batch 2", model, lambda: omnigen2(batch=2, height=11, width=9, text=5)),
        Case(f"{model} one text token", model, lambda: omnigen2(text=1)),
        # Only the text refiner, which every rank runs in full, reads it: a mask of the scores, [batch, rows, keys].
        Case(f"{model} text mask", model, lambda: omnigen2(attention_mask=normal(1, 7, 7)), ("attention_mask",)),
        Case(f"{model} references", model, lambda: omnigen2(ref_latents=references()), ("ref_latents",)),
        Case(f"{model} references batch 2", model, lambda: omnigen2(batch=2, ref_latents=references(2)), ("ref_latents",)),
    )
]
SERVED = [
    Served(name, model, (16, 12, 10), 7, 48, {"attention_mask": torch.ones(1, 7, dtype=torch.long), **cond}, cfg=2.0)
    for model in ("omnigen2", "boogu")
    for name, cond in ((model, {}), (f"{model}-edit", {"reference_latents": [(1, 16, 8, 6)]}))
]
