"""Devices that ranks share with this process: neither side can use the other's memory there, or see whose it is.

| Memory of this process | freed by |
|---|---|
| DynamicVRAM's pages of a model, left by a run without context parallelism | `free_ui_memory`, before the ranks load the model |
| the model itself, with --highvram and --gpu-only | `free_ui_memory` |
| torch's cache of freed memory | `free_ui_memory` |
| models that do not sample now | ComfyUI's own memory manager, or `free_for_ranks` where they or a rank out of memory need it |

| Memory of the ranks | freed by |
|---|---|
| a model that is loaded without them | `stock_loads`, before ComfyUI loads it |
| torch's cache of freed memory | `stock_loads`, before ComfyUI's memory manager looks at the device |
| a model while ComfyUI loads another one | that memory manager, which sees an ordinary model (`patcher`), until its next call |
| all models, with `/free` | `stock_loads` |

With DynamicVRAM the weights stay as they are in the mapped file, which cannot be written to, and get the model's dtype on use. A
module stores the address of its pages on a device (`_v`) and the state with which it has filled them (`_v_signature`); copies of
its weights are in pinned memory of the host. ComfyUI makes all of it again when it reloads the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import comfy.model_management
import comfy.model_patcher
import torch

from ...compat import as_parameter, parameter_slots
from ..shared.weights import AS_IN_FILE, is_dynamic, is_small, model_dtype, network_of
from .notes import on_ranks

_OF_PAGES = ("_v", "_v_signature", "_v_weight", "_v_bias")
ALL_PAGES = 1e32
LOADED_TOGETHER: WeakSet[Any] = WeakSet()
"""Patchers that ComfyUI loaded together with the last model for the ranks. It notes that a model is idle only where it makes room:
on the device of that model."""


def give_back(model: Any) -> bool:
    """Free DynamicVRAM's memory for a model: pages of devices, and copies in pinned memory. Return whether it held pages.

    Modules forget their pages as well. They may contain weight patches, and ComfyUI would no longer know which.
    """
    for device in vars(model).get("dynamic_pins", {}):
        owner = SimpleNamespace(model=model, load_device=device)
        comfy.model_patcher.ModelPatcherDynamic.partially_unload_ram(owner, ALL_PAGES)
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
    """Convert the weights of a model to its dtype: computing without DynamicVRAM does not do so."""
    for module in model.modules():
        slots = parameter_slots(module)
        small = is_small(module, slots.values())
        vars(module).update(AS_IN_FILE if small else {})
        for name, weight in {} if small else slots.items():
            if weight is not None and not weight.is_meta and (dtype := model_dtype(model, module, name)) != weight.dtype:
                slots[name] = as_parameter(weight.to(dtype), weight.requires_grad)


def patcher_over(plain: Any) -> Any:
    """Return a patcher of ComfyUI's kind for this model: a dynamic one where DynamicVRAM has loaded it."""
    if not is_dynamic(plain.model):
        return plain
    kind = comfy.model_patcher.ModelPatcherDynamic
    made = kind(plain.model, plain.load_device, plain.offload_device, plain.size, plain.weight_inplace_update)
    vars(made).update(vars(plain))
    return made


def free_ui_memory(model: Any) -> None:
    """Free this process's memory for a `BaseModel` or a VAE on all devices, and torch's cache there.

    Its weights stay valid, in host memory: where they are not the pages of the file, with --highvram, they are copied there.
    """
    give_back(model)
    network_of(model).to("cpu")
    model.device = torch.device("cpu")
    comfy.model_management.soft_empty_cache()


def free_for_ranks(devices: Iterable[str]) -> None:
    """Make ComfyUI unload idle models from devices (torch's names), but no model of the ranks, and free torch's cache there."""
    models, main = comfy.model_management.current_loaded_models, comfy.model_management.get_torch_device()
    in_use = [
        loaded
        for loaded in models
        if on_ranks(loaded.model.model) or (loaded.currently_used and (loaded.device == main or loaded.model in LOADED_TOGETHER))
    ]
    # ComfyUI asks a device how much is free. If this process has not used the device yet, that takes memory for a context.
    for device in {torch.device(name) for name in devices} & {loaded.device for loaded in models}:
        comfy.model_management.free_memory(1e30, device, keep_loaded=in_use)
    comfy.model_management.soft_empty_cache()
