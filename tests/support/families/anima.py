"""Anima. Its text adapter, which runs before the sharded forward, has no sizes to choose: half a gigabyte."""

from typing import Any

from torch import Tensor

from . import Case, Model, Served, normal
from .cosmos_predict2 import PREDICT2, predict2

CLS = "comfy.ldm.anima.model.Anima"


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Small for the residuals of the adapter."""
    return values * 0.02 if name.startswith("llm_adapter") and parameter.ndim > 1 else None


MODELS = {"anima": Model(CLS, dict(PREDICT2, crossattn_emb_channels=1024), "Anima", {"image_model": "anima"}, init)}


def anima(text: int = 6, **extra: Any) -> dict[str, Any]:
    return {**predict2(**extra), "context": normal(extra.get("batch", 1), text, 1024)}


CASES = [Case("anima", "anima", anima), Case("anima batch 2 odd", "anima", lambda: anima(batch=2, height=7, width=9))]
SERVED = [Served("anima", "anima", (16, 1, 16, 16), 12, 1024)]
