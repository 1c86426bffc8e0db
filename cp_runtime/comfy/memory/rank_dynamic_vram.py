"""Weight patches as DynamicVRAM puts them into a weight, for a model that it has loaded in ComfyUI's process.

Where it rounds a patched weight to 8 bits, it does so by the name of the module; ComfyUI's other patchers, by that of the weight.
It keeps what it has rounded for the calls behind the first one with a weight (`comfy.ops.resolve_cast_module_with_vbar`).
"""

from __future__ import annotations

from typing import Any

import comfy.float
import comfy.lora
import comfy.ops
import torch
from comfy import model_management
from comfy.model_patcher import get_key_weight
from comfy.utils import get_attr, string_to_seed
from torch import Tensor

from ..model.wire_dtypes import SMALL, STAYS


def patched(patcher: Any, key: str, device: torch.device | None) -> Tensor | None:
    """Return a weight with its patches on a device; None where DynamicVRAM patches its module as the other patchers do."""
    path, _, parameter = key.rpartition(".")
    module = get_attr(patcher.model, path)
    weight = get_key_weight(patcher.model, key)[0]
    quantised = hasattr(weight, "requantize_from_float")
    small = model_management.module_size(module) <= SMALL if quantised else STAYS in vars(module)
    if small or parameter not in ("weight", "bias") or not hasattr(module, "comfy_cast_weights"):
        return None
    device, dtype, seed = device or weight.device, patcher.model.get_dtype_inference(), string_to_seed(path)
    if isinstance(module, comfy.ops.fp8_ops.Linear) and weight.dtype == torch.float8_e4m3fn:
        dtype = model_management.lora_compute_dtype(device)
    numbers = model_management.cast_to_device(weight, device, dtype, copy=True)
    numbers = numbers.dequantize() if quantised else numbers
    made: Tensor = comfy.lora.calculate_weight(patcher.patches[key], numbers, key, intermediate_dtype=dtype)
    if quantised:
        return weight.to(device).requantize_from_float(made, scale="recalculate", stochastic_rounding=seed)
    return comfy.float.stochastic_rounding(made, weight.dtype, seed=seed)
