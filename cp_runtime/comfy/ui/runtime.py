"""The controller of this process, the one owner of its ranks; the devices that they may use; where they find this process's ComfyUI
and its models. Nothing runs before someone asks for it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import comfy.model_management
import comfy.options
import folder_paths
import torch
from comfy.cli_args import args

from ...controller.controller import Controller
from ...engine.measuring import device_name
from ...errors import ConfigError, bad_value, check_switch
from ...pool.config import DeviceInventory, RuntimeConfig, WorkerSite, has_code
from ...pool.launcher import child_environment
from ...pool.peers import is_p2p_disabled, without_peer_access
from ...pool.processes import WAITING
from ...system import system
from ...system.environment import library_setting
from .residency import free_for_ranks
from .single_device import SingleDeviceReason, single_device_reason, why_no_gpu

log = logging.getLogger("context_parallel")

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
PRELOAD_CPU = (*PRELOAD, "cp_runtime.comfy.rank.preload")
CONFIG = "CPConfig"  # the node


def device_inventory() -> DeviceInventory:
    """Return the devices of the type that ComfyUI itself runs on."""
    device = comfy.model_management.get_torch_device()
    kind, own = device.type, device.index or 0
    try:
        count = 0 if kind == "cpu" else torch.get_device_module(kind).device_count()
    except RuntimeError:  # a device type that torch has no module for
        count = 1
    if kind == "cuda":
        gpus = cuda_gpus(count)
        return DeviceInventory(type=kind, count=len(gpus), too_old=_too_old(gpus), own=own)
    return DeviceInventory(type=kind, count=count, own=own)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device."""

    title: str
    memory: int  # bytes
    capability: tuple[int, int]


@cache
def cuda_gpus(visible: int) -> tuple[Gpu, ...]:
    """Return the CUDA devices that ranks may use. `visible`: how many this process sees."""
    chosen = args.cuda_device is not None or args.default_device is not None
    if not chosen and library_setting("CUDA_VISIBLE_DEVICES") == "0" and (hidden := system.hidden_gpus()):
        return tuple(Gpu(*each) for each in hidden)  # ComfyUI itself has hidden them
    found = [torch.cuda.get_device_properties(number) for number in range(visible)]
    return tuple(Gpu(str(each.name), int(each.total_memory), (each.major, each.minor)) for each in found)


def title_of(device: str) -> str:
    """Return the name of a device, as torch has it; also of one that ComfyUI hides from this process."""
    named = torch.device(device)
    gpus = cuda_gpus(torch.cuda.device_count()) if named.type == "cuda" else ()
    return gpus[named.index or 0].title if gpus else device_name(named)


def multiplies_nvfp4(device: str) -> bool:
    """Return whether a device may multiply in NVFP4; True for one of another computer, which ComfyUI cannot ask."""
    if "/" in device:
        return True
    named = torch.device(device)
    if named.type == "cuda" and (visible := torch.cuda.device_count()) <= (named.index or 0) < len(cuda_gpus(visible)):  # hidden
        return cuda_gpus(visible)[named.index].capability >= (10, 0)
    return bool(comfy.model_management.supports_nvfp4_compute(named))


@cache
def _too_old(gpus: tuple[Gpu, ...]) -> tuple[int, ...]:
    """Return the numbers of CUDA devices that torch was built without code for."""
    architectures, found = torch.cuda.get_arch_list(), []
    for number, gpu in enumerate(gpus):
        if not has_code(architectures, gpu.capability):
            found.append(number)
            version = "{}.{}".format(*gpu.capability)
            log.warning(
                "cuda:%d (%s) is left out: torch was built without code for compute capability %s", number, gpu.title, version
            )
    return tuple(found)


def default_config() -> RuntimeConfig:
    """Return the config of a node without a CP Config: the devices that were chosen in the panel, or every device where these are
    gone, and all choices automatic."""
    try:
        return RuntimeConfig.resolve(inventory=device_inventory(), devices=CONTROLLER.preferences.chosen.devices)
    except ConfigError as error:
        log.warning("all devices are used instead of those that were chosen in the panel: %s", error)
        return RuntimeConfig.resolve(inventory=device_inventory())


def prefer(changes: dict[str, Any]) -> None:
    """Store choices of the panel: some of the fields of `Preferences`. Raises ConfigError: they are wrong."""
    if not changes.keys() <= {"devices", "measure"}:
        raise bad_value("settings", changes, "devices, measure or both", "Send these only.")
    RuntimeConfig.resolve(inventory=device_inventory(), devices=changes.get("devices", ""))
    check_switch("measure", changes.get("measure", True))
    CONTROLLER.preferences.choose(**changes)
    CONTROLLER.journal.changed.set()


def nothing_to_share() -> SingleDeviceReason | None:
    """Return why one device computes alone here; None = there are several, or CPU ranks."""
    return single_device_reason(device_inventory())


def found_devices() -> dict[str, Any]:
    """Return the choices of the panel and CP Config. It opens no device that ComfyUI has not opened.

    `devices`: for each the `name` as CP Config takes it, the `title` that torch has for it and its `memory` in bytes, 0 where that
    is not known. `indirect`: pairs of GPUs that do not reach each other's memory, None where nobody knows. `reason`: why there are
    no GPUs, None where there are.
    """
    inventory = device_inventory()
    names = [f"{inventory.type}:{index}" for index in inventory.usable or range(inventory.default_ranks)]
    pairs = [f"{one} to {other}" for one, other in permutations(names, 2)]
    blocked = is_p2p_disabled() or not system.HAS_DEVICE_BACKENDS
    reason = why_no_gpu(inventory, args.cpu, bool(torch.version.cuda or torch.version.hip))
    own = [{"name": name, **_description(inventory, index)} for index, name in enumerate(names)]
    indirect = (pairs if blocked else without_peer_access(names)) if inventory.type == "cuda" else None
    return {
        "devices": own,
        "indirect": indirect,
        "reason": None if reason is None else reason.described,
    }


def _description(inventory: DeviceInventory, index: int) -> dict[str, Any]:
    """Return the known facts about a device; there may be none."""
    kind = inventory.type
    if kind == "cuda":
        gpu = cuda_gpus(inventory.count)[index]
        return {"title": gpu.title, "memory": gpu.memory}
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    found = None if properties is None or kind == "cpu" else properties(index)
    return {"title": str(getattr(found, "name", "")), "memory": int(getattr(found, "total_memory", 0))}


def node_folders() -> list[str]:
    return sorted(map(os.path.abspath, folder_paths.get_folder_paths("custom_nodes")))


def model_folders() -> dict[str, list[str]]:
    """Return ComfyUI's folders by the kind of model in them."""
    return {kind: found for kind, (found, _) in folder_paths.folder_names_and_paths.items()}


def worker_site() -> WorkerSite:
    """Return the site of the ranks: their code, and their ComfyUI."""
    return WorkerSite(
        service="comfy.rank.service",
        path=(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_management.__file__))),),
        preload=PRELOAD_CPU if args.cpu else PRELOAD,
        # Where another program embeds ComfyUI, the command line is not ComfyUI's.
        argv=("main.py", *(sys.argv[1:] if comfy.options.args_parsing else ())),
    )


def import_ahead(nodes: Set[str], prompt: Any) -> Any:
    """Start the ranks' processes if there are several accelerators, and no ranks, and a prompt has one of these nodes, not all for
    one device; return `prompt` as it is. They import for seconds, which the prompt spends on its text encoder. ComfyUI calls this
    before it queues one."""
    graph = prompt.get("prompt")
    entries = [entry for entry in graph.values() if isinstance(entry, dict)] if isinstance(graph, dict) else []
    configs = [entry.get("inputs") for entry in entries if entry.get("class_type") == CONFIG]
    alone = bool(configs) and all(isinstance(inputs, dict) and inputs.get("world_size") == 1 for inputs in configs)
    ours = any(entry.get("class_type") in nodes for entry in entries) and not alone
    if ours and not CONTROLLER.in_use and (inventory := device_inventory()).count > 1:
        with contextlib.suppress(OSError, RuntimeError):  # as the ranks will say
            WAITING.start(worker_site(), child_environment(inventory.type, inventory.count), inventory.count)
    return prompt


CONTROLLER = Controller(worker_site, free_for_ranks)
atexit.register(CONTROLLER.close)
