"""What the UI process and the ranks must agree on about a call of a VAE."""

from __future__ import annotations

from typing import Any

from ...compat import parameter_slots
from ..model.wire_dtypes import model_dtype

VAE_METHODS = ("decode", "encode")
EXACT, TILES = "exact", "tiles"
INPUT = "vae_input"
"""Argument that ranks leave in the memory of the message: each copies only what it works on. `exact`: a tensor; `tiles`: a list."""


def dtypes_of(model: Any) -> tuple[str, str]:
    """Return the names of a model's weight dtype, and of the dtype that it computes in if that differs."""
    if hasattr(model, "manual_cast_dtype"):
        return str(model.get_dtype()), str(model.manual_cast_dtype)
    weights = (
        (module, name) for module in model.modules() for name, weight in parameter_slots(module).items() if weight is not None
    )
    return str(next((model_dtype(model, *weight) for weight in weights), None)), str(None)
