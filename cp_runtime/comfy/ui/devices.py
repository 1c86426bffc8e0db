"""The devices that ranks may use."""

from __future__ import annotations

import comfy.model_management
import torch

from ...pool.config import DeviceInventory


def device_inventory() -> DeviceInventory:
    """Those of the type that ComfyUI itself runs on."""
    kind = comfy.model_management.get_torch_device().type
    try:
        count = 0 if kind == "cpu" else torch.get_device_module(kind).device_count()
    except RuntimeError:  # a device type that torch has no module for
        count = 1
    return DeviceInventory(type=kind, count=count)
