"""The device memory that a rank has for a call."""

from __future__ import annotations

from typing import Any

import torch
from comfy import model_management


def room(device: torch.device) -> int | None:
    """Return the bytes that a call could take if all weights made way for it; None for a CPU, whose memory ComfyUI's process sees
    as well.

    Weights that every rank keeps a part of do not make way: without them nothing runs.
    ComfyUI would rather move weights to the host than compute CFG halves one after the other: `ModelPatcher.get_free_memory`
    counts what DynamicVRAM holds as free.
    """
    if device.type == "cpu":
        return None
    can_go = (each.model_loaded_memory() for each in _on(device) if getattr(each.model, "cp_weights", None) is None)
    return max(0, int(model_management.get_free_memory(device) + sum(can_go)))  # below 0 with `--reserve-vram`


def available(device: torch.device) -> int | None:
    """Return the bytes that a model and its calls could take if all others were unloaded, less what ComfyUI keeps free; None for a
    CPU."""
    if device.type == "cpu":
        return None
    held = sum(each.model_loaded_memory() for each in _on(device))
    return max(0, int(model_management.get_free_memory(device) + held - model_management.minimum_inference_memory()))


def _on(device: torch.device) -> list[Any]:
    return [each for each in model_management.current_loaded_models if each.device == device]
