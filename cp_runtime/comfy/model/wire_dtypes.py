"""The dtype that a weight has for its model. With DynamicVRAM it lies in memory as it is in the file, until it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...compat import parameter_slots


def is_dynamic(model: Any) -> bool:
    """Whether DynamicVRAM has loaded a model, whichever patcher it has now. Ranks do without."""
    return "dynamic_patchers" in vars(model)


def model_dtype(model: Any, module: nn.Module, name: str) -> torch.dtype:
    """Of a parameter of one of a model's modules. A quantised one stays as it is."""
    weight = parameter_slots(module)[name]
    noted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
    return weight.dtype if noted is None or not is_dynamic(model) or hasattr(weight, "__tensor_flatten__") else noted
