"""Devices that ranks share with this process: who holds memory there, and how it is given back."""

from __future__ import annotations

from collections.abc import Iterable

import comfy.model_management
import torch


def free_for_ranks(devices: Iterable[str]) -> None:
    """Have ComfyUI unload what it does not sample with, from devices of ranks, and give back what torch keeps there.

    Args:
        devices: as torch names them.
    """
    in_use = [loaded for loaded in comfy.model_management.current_loaded_models if loaded.currently_used]
    for device in set(devices):
        comfy.model_management.free_memory(1e30, torch.device(device), keep_loaded=in_use)
    comfy.model_management.soft_empty_cache()
