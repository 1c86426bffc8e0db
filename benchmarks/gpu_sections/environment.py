"""What the machine has."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from importlib import metadata

import psutil
import torch
from support.package import load_package
from torch.cuda import nccl

from .options import Options
from .results import NEEDS_SEVERAL, Results

load_package()

from cp_runtime.pool.peers import without_peer_access

PACKAGES = ("flash-attn", "sageattention", "triton", "xformers", "comfy-kitchen", "safetensors", "transformers", "diffusers")


def run(options: Options, results: Results) -> None:
    """One result per kind of thing."""
    memory = round(psutil.virtual_memory().total / 1e9)
    results.add("computer", cores=os.cpu_count(), memory_GB=memory, machine=platform.machine(), python=platform.python_version())
    results.add("torch", version=torch.__version__, cuda=torch.version.cuda or "none")
    file = options.comfyui / "comfyui_version.py"
    found = re.search(r'"(.+)"', file.read_text()) if file.exists() else None
    results.add("ComfyUI", version=found[1] if found else "unknown")
    results.add("packages", **{name: _version(name) for name in PACKAGES})
    with results.part("libraries"):
        version = ".".join(map(str, nccl.version()))
        results.add("libraries", nccl=version, cudnn=str(torch.backends.cudnn.version()), driver=_driver())
    count = torch.cuda.device_count()
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        results.add(
            f"cuda:{index}",
            name=card.name,
            memory_GB=card.total_memory / 1e9,
            free_GB=free / 1e9,
            capability=f"{card.major}.{card.minor}",
        )
    if count == 1:
        results.add("peer-to-peer", NEEDS_SEVERAL)
        return
    results.add("peer-to-peer", pairs=count * (count - 1), without=without_peer_access([f"cuda:{i}" for i in range(count)]))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(package.replace("-", "_")) else "none"


def _driver() -> str:
    """The driver's version, from the tool that comes with it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
