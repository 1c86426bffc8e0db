"""Devices that ranks share with this process: neither side can use memory that the other holds there, or see whose it is.

| This process holds | given back |
|---|---|
| what DynamicVRAM has of a model, left by a run without context parallelism | `make_way`, before the ranks load the model |
| the model itself, with --highvram and --gpu-only | `make_way` |
| what torch keeps of freed memory | `make_way` |
| models that do not sample now | ComfyUI's own memory manager, or `free_for_ranks` once a rank has run out of memory |

| The ranks hold | given back |
|---|---|
| a model that is loaded without them | `stock_loads`, before ComfyUI loads it |
| what torch keeps of freed memory | `stock_loads`, before ComfyUI's memory manager looks at the device |
| a model while ComfyUI loads another one | that memory manager, which sees an ordinary model (`ui_patcher`), until its next call |
| all models, with `/free` | `stock_loads` |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import comfy.model_management
import torch

from .ui_dynamic_vram import give_back


def make_way(model: Any) -> None:
    """Give back what this process holds of a `BaseModel` or a VAE on any device, and what torch keeps there of freed memory.

    Its weights stay valid, in host memory: where they are not the pages of the file, with --highvram, they are copied there.
    """
    give_back(model)
    getattr(model, "diffusion_model", model).to("cpu")
    model.device = torch.device("cpu")
    comfy.model_management.soft_empty_cache()


def free_for_ranks(devices: Iterable[str]) -> None:
    """Have ComfyUI unload what it does not sample with, from devices of ranks, and give back what torch keeps there.

    Args:
        devices: as torch names them.
    """
    models = comfy.model_management.current_loaded_models
    in_use = [loaded for loaded in models if loaded.currently_used]
    # ComfyUI asks a device how much is free. If this process has not used the device yet, that takes memory for a context.
    for device in {torch.device(name) for name in devices} & {loaded.device for loaded in models}:
        comfy.model_management.free_memory(1e30, device, keep_loaded=in_use)
    comfy.model_management.soft_empty_cache()
