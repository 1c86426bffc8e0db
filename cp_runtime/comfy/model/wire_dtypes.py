"""The dtypes of a model's weights. With DynamicVRAM a weight lies in memory as it is in the file, until it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import parameter_slots
from ...nested import stored

SMALL = 16 << 10  # bytes: in `ModelPatcherDynamic.load`
STAYS = "context_parallel_stays"  # attribute of modules for which `stays_as_in_file` returned True


def is_dynamic(model: Any) -> bool:
    """Return whether DynamicVRAM has loaded a model, whichever patcher it has now. Ranks do without it."""
    return "dynamic_patchers" in vars(model)


def model_dtype(model: Any, module: nn.Module, name: str) -> torch.dtype:
    """Return the dtype of a parameter of one of a model's modules. A quantised one stays as it is."""
    weight = parameter_slots(module)[name]
    noted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
    return weight.dtype if noted is None or not is_dynamic(model) or hasattr(weight, "__tensor_flatten__") else noted


def dtypes_of(model: Any) -> tuple[str, str]:
    """Return the names of a model's weight dtype, and of the dtype that it computes in if that differs. `model`: or a VAE."""
    if hasattr(model, "manual_cast_dtype"):
        return str(model.get_dtype()), str(model.manual_cast_dtype)
    weights = (
        (module, name) for module in model.modules() for name, weight in parameter_slots(module).items() if weight is not None
    )
    return str(next((model_dtype(model, *weight) for weight in weights), None)), str(None)


def network_of(model: Any) -> Any:
    """Return the network of a `BaseModel`, its transformer, or a VAE, which is one."""
    return getattr(model, "diffusion_model", model)


def stays_as_in_file(module: nn.Module, weights: Iterable[Tensor | None]) -> bool:
    """Return whether DynamicVRAM leaves a module's weights in the dtype of the file, since it is small; mark the module if so. It
    converts them when it runs.

    Args:
        weights: as they are in the file.
    """
    parts = (part for weight in weights if weight is not None for part in stored(weight))
    small = hasattr(module, "comfy_cast_weights") and sum(part.nbytes for part in parts) <= SMALL
    if small:
        vars(module).update({"comfy_cast_weights": True, STAYS: True})
    return small
