"""Quantised formats that devices multiply in. For a device that cannot, ComfyUI casts the weights."""

from __future__ import annotations

from collections.abc import Collection

import comfy.model_management
import torch
from torch import nn

KINDS = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Kind of format that a device must support, by a layer's format."""

CASTS = "_full_precision_mm"  # ComfyUI's name for it


def formats_of(device: torch.device) -> list[str]:
    """Return the kinds of formats that a device multiplies in."""
    management = comfy.model_management
    able = {
        "fp8": management.supports_fp8_compute(device),
        "mxfp8": management.supports_mxfp8_compute(device),
        "nvfp4": management.supports_nvfp4_compute(device),
    }
    return [kind for kind, supported in able.items() if supported]


def cast_others(model: nn.Module, kinds: Collection[str]) -> dict[nn.Module, str]:
    """Have ComfyUI cast the weights of layers in other kinds of formats, as it does for a device that cannot multiply in them.

    Returns the layers whose weights it did not cast before, and their kinds.
    """
    changed: dict[nn.Module, str] = {}
    for module in model.modules():
        kind = KINDS.get(getattr(module, "quant_format", None) or "")
        if kind is not None and kind not in kinds and not getattr(module, CASTS):
            changed[module] = kind
            set_cast(module, True)
    return changed


def set_cast(layer: nn.Module, casts: bool) -> None:
    """Set whether ComfyUI casts the weights of a quantised layer."""
    layer.__dict__[CASTS] = casts
