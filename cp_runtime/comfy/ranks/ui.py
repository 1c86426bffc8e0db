"""The controller of this process, the one owner of its ranks; the devices that they may use; and where they find this process's
ComfyUI and its models."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import comfy.model_management
import comfy.options
import folder_paths
import torch
from comfy.cli_args import args

from ...controller.controller import Controller
from ...pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from ..memory.ui_residency import free_for_ranks
from .ui_alone import Alone, why_alone

PRELOAD = (
    "torch",
    "torchvision",
    "torchaudio",
    "scipy.integrate",
    "scipy.ndimage",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.tokenization_t5",
    "transformers.models.qwen2.tokenization_qwen2",
    "einops",
    "psutil",
    "safetensors.torch",
    "yaml",
)
"""What ComfyUI's code in a rank imports of other packages: nine tenths of its time. ComfyUI itself looks at its device when it is
imported, so every rank does that on its own, unless the device is the CPU."""
PRELOAD_CPU = (*PRELOAD, "cp_runtime.comfy.ranks.rank_preload")
NO_MODELS = ("custom_nodes", "datasets", "configs")  # folders that ComfyUI knows and keeps no weights in


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
    names = [] if inventory.type == "cpu" else [f"{inventory.type}:{i}" for i in range(inventory.count)]
    return [{"name": name, "label": " ".join([name, *_description(inventory.type, i)])} for i, name in enumerate(names)]


def _description(kind: str, index: int) -> list[str]:
    """Return what torch knows of a device, which may be nothing."""
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    if properties is None:
        return []
    found = properties(index)
    memory = getattr(found, "total_memory", 0)
    return [str(getattr(found, "name", "")), *([f"{memory / 2**30:.0f} GB"] if memory else [])]


def node_folders() -> list[str]:
    """Return the folders of ComfyUI's node packs."""
    return sorted(map(os.path.abspath, folder_paths.get_folder_paths("custom_nodes")))


def worker_site() -> WorkerSite:
    """Return the site of the ranks: their code, their ComfyUI, and the folders that they may load models from."""
    registered = {name: folders for name, (folders, _) in folder_paths.folder_names_and_paths.items() if name not in NO_MODELS}
    folders = {os.path.abspath(folder) for folders in registered.values() for folder in folders}
    return WorkerSite(
        service="comfy.ranks.rank_service",
        arguments={"model_folders": sorted(folders), "node_folders": node_folders()},
        path=(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_management.__file__))),),
        preload=PRELOAD_CPU if args.cpu else PRELOAD,
        # Where another program embeds ComfyUI, the command line is not ComfyUI's.
        argv=("main.py", *(sys.argv[1:] if comfy.options.args_parsing else ())),
    )


CONTROLLER = Controller(worker_site, free_for_ranks)
atexit.register(CONTROLLER.close)
