"""Memory that DynamicVRAM holds for a model of this process, and how to release it where the ranks take the model over.

The weights stay as they are in the mapped file, which cannot be written to, and get the model's dtype where they are used. A module
knows its place among the pages of a device (`_v`) and which state of these it has filled (`_v_signature`); copies of its weights
are in pinned memory of the host. ComfyUI makes all of it again when it reloads the model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.model_patcher

from ...compat import as_parameter, parameter_slots
from ..model.wire_dtypes import is_dynamic, model_dtype, stays_as_in_file

_OF_PAGES = ("_v", "_v_signature", "_v_weight", "_v_bias")
EVERYTHING = 1e32


def give_back(model: Any) -> bool:
    """Give back what DynamicVRAM holds of a model: pages of devices, and copies in pinned memory. Returns whether it held pages.

    Modules forget their pages as well. What is in them may have weight patches in it, and ComfyUI would no longer know which.
    """
    for device in vars(model).get("dynamic_pins", {}):
        owner = SimpleNamespace(model=model, load_device=device)
        comfy.model_patcher.ModelPatcherDynamic.partially_unload_ram(owner, EVERYTHING)
    held = vars(model).get("dynamic_vbars", {})
    if not held:
        return False
    for pages in held.values():
        pages.free_memory(pages.loaded_size())
    held.clear()
    for module in model.modules():
        for name in _OF_PAGES:
            vars(module).pop(name, None)
    return True


def convert(model: Any) -> None:
    """Give the weights of a model the dtype that they are to be used in: what computes without DynamicVRAM does not do so."""
    for module in model.modules():
        slots = parameter_slots(module)
        for name, weight in {} if stays_as_in_file(module, slots.values()) else slots.items():
            if weight is not None and not weight.is_meta and (dtype := model_dtype(model, module, name)) != weight.dtype:
                slots[name] = as_parameter(weight.to(dtype), weight.requires_grad)


def patcher_over(plain: Any) -> Any:
    """Return a patcher of the kind that ComfyUI makes for this model: a dynamic one where DynamicVRAM has loaded it."""
    if not is_dynamic(plain.model):
        return plain
    kind = comfy.model_patcher.ModelPatcherDynamic
    made = kind(plain.model, plain.load_device, plain.offload_device, plain.size, plain.weight_inplace_update)
    vars(made).update(vars(plain))
    return made
