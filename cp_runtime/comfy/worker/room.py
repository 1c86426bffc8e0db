"""How much memory of its device a rank has for a call."""

from __future__ import annotations

import torch
from comfy import model_management


def room(device: torch.device) -> int | None:
    """Bytes that a call could take if all weights made way for it; None for a CPU, whose memory ComfyUI's process sees as well.

    ComfyUI would rather move weights to the host than compute CFG halves one after the other: `ModelPatcher.get_free_memory`
    counts what DynamicVRAM holds as free.
    """
    if device.type == "cpu":
        return None
    loaded = (each.model_loaded_memory() for each in model_management.current_loaded_models if each.device == device)
    return int(model_management.get_free_memory(device) + sum(loaded))
