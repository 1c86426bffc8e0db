"""What the machine has."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from importlib import metadata

import psutil
import torch
from support import families
from torch.cuda import nccl

from cp_runtime.pool.peers import without_peer_access

from .section import NEEDS_SEVERAL, Section

PACKAGES = ("flash-attn", "sageattention", "triton", "xformers", "comfy-kitchen", "safetensors", "transformers", "diffusers")
DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def environment(section: Section) -> None:
    """One result per kind of thing."""
    memory = round(psutil.virtual_memory().total / 1e9)
    section.add("computer", cores=os.cpu_count(), memory_GB=memory, machine=platform.machine(), python=platform.python_version())
    section.add("torch", version=torch.__version__, cuda=torch.version.cuda or "none")
    section.add("ComfyUI", version=families.version() or "unknown")
    section.add("packages", **{name: _version(name) for name in PACKAGES})
    with section.part("libraries"):
        version = ".".join(map(str, nccl.version()))
        section.add("libraries", nccl=version, cudnn=str(torch.backends.cudnn.version()), driver=_driver())
    cards = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for name in cards:
        card, (free, total) = torch.cuda.get_device_properties(name), torch.cuda.mem_get_info(name)
        capability = f"{card.major}.{card.minor}"
        section.add(name, name=card.name, memory_GB=total / 1e9, free_GB=free / 1e9, capability=capability)
    if len(cards) == 1:
        section.add("peer-to-peer", NEEDS_SEVERAL)
    else:
        section.add("peer-to-peer", pairs=len(cards) * (len(cards) - 1), without=without_peer_access(cards))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(package.replace("-", "_")) else "none"


def _driver() -> str:
    """The driver's version, from the tool that comes with it."""
    try:
        return subprocess.run(DRIVER, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
