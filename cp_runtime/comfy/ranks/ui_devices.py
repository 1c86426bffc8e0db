"""The devices that ranks may use."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ...pool.config import DeviceInventory, RuntimeConfig
from .ui_alone import Alone, why_alone


def device_inventory() -> DeviceInventory:
    """Return the devices of the type that ComfyUI itself runs on."""
    kind = comfy.model_management.get_torch_device().type
    try:
        count = 0 if kind == "cpu" else torch.get_device_module(kind).device_count()
    except RuntimeError:  # a device type that torch has no module for
        count = 1
    return DeviceInventory(type=kind, count=count)


def default_config() -> RuntimeConfig:
    """Return the config of a node without a CP Config: every device, and all choices automatic."""
    return RuntimeConfig.resolve(inventory=device_inventory())


def nothing_to_share() -> Alone | None:
    """Return why one device computes alone here; None = there are several, or CPU ranks."""
    return why_alone(device_inventory())


def named_devices() -> list[dict[str, Any]]:
    """Return the devices for users to choose from: `name` as CP Config takes it, `label` such as "cuda:1 NVIDIA GeForce RTX 4090 24
    GB". Empty for CPUs."""
    inventory = device_inventory()
    if inventory.type == "cpu":
        return []
    names = [f"{inventory.type}:{i}" for i in range(inventory.count)]
    return [{"name": name, "label": " ".join([name, *_description(inventory.type, i)])} for i, name in enumerate(names)]


def _description(kind: str, index: int) -> list[str]:
    """Return what torch knows of a device, which may be nothing."""
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    if properties is None:
        return []
    found = properties(index)
    memory = getattr(found, "total_memory", 0)
    return [str(getattr(found, "name", "")), *([f"{memory / 2**30:.0f} GB"] if memory else [])]
