"""Anima. Its text adapter runs before the sharded forward."""

from typing import Any

from torch import Tensor

from . import Case, Model, Served, normal
from .cosmos_predict2 import PREDICT2, predict2

MODULE = "comfy.ldm.anima.model"
WIDTH = 64
# Widths, words and layers of the adapter.
SIZES = {MODULE: {1024: WIDTH, 32128: 96, 6: 2}}


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Small for the residuals of the adapter."""
    return values * 0.02 if name.startswith("llm_adapter") and parameter.ndim > 1 else None


MODELS = {
    "anima": Model(MODULE + ".Anima", dict(PREDICT2, crossattn_emb_channels=WIDTH), "Anima", {"image_model": "anima"}, init,
        sizes=SIZES),
}  # fmt: skip


def anima(text: int = 6, **extra: Any) -> dict[str, Any]:
    return {**predict2(**extra), "context": normal(extra.get("batch", 1), text, WIDTH)}


CASES = [Case("anima", "anima", anima), Case("anima batch 2 odd", "anima", lambda: anima(batch=2, height=7, width=9))]
SERVED = [Served("anima", "anima", (16, 1, 16, 16), 12, WIDTH)]
