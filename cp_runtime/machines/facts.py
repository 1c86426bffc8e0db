"""What two machines must have in common to compute one picture, and what to do where they do not."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError
from ..system import HAS_MACHINES
from ..version import VERSION

_SAME = {
    "pack": ("this pack", "Update the older one: git pull in custom_nodes/comfyui-context-parallel."),
    "comfyui": ("ComfyUI", "Update the older one."),
    "torch": ("torch", "Install the same version into both environments: pip install torch=={host}."),
    "nccl": ("NCCL", "It comes with torch: install the same build of torch."),
    "comfy-kitchen": ("comfy-kitchen", "pip install comfy-kitchen=={host}"),
    "kind": ("type of devices", "Start ComfyUI, and join.py, so that both see GPUs of one kind, or both with --cpu."),
    "dtypes": ("dtypes that devices multiply in", "Leave the older GPU out, or load a model in a dtype that both have."),
}
"""By fact: its name, and the remedy where it differs."""


def check_system() -> None:
    """Raise UnsupportedError where computers cannot work for each other."""
    if not HAS_MACHINES:
        raise UnsupportedError("Computers work for each other on Linux and WSL2 only. Alone, this one uses its own devices.")


def facts_of(comfyui: str | Path, kind: str) -> dict[str, Any]:
    """Return the facts of this machine. `comfyui`: folder of ComfyUI. `kind`: torch's type of its devices."""
    return {
        "pack": VERSION,
        "comfyui": _comfyui_version(Path(comfyui)),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else "none",
        "comfy-kitchen": _version("comfy-kitchen"),
        "kind": kind,
        "dtypes": _dtypes(kind),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def differences(host: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what has to be changed before the machines can work together: a sentence for every difference, all at once."""
    return [
        f"{name}: {host.get(key)} on the computer with ComfyUI, {other.get(key)} here. {remedy.format(host=host.get(key))}"
        for key, (name, remedy) in _SAME.items()
        if host.get(key) != other.get(key)
    ]


def devices_of(kind: str) -> list[str]:
    """Return the devices of this machine: every accelerator, or one CPU rank."""
    return ["cpu"] if kind == "cpu" else [f"{kind}:{i}" for i in range(torch.get_device_module(kind).device_count())]


def _dtypes(kind: str) -> str:
    """Return the dtypes in which all devices of this machine multiply natively."""
    if kind != "cuda":
        return "float32"
    least = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    able = [(5, 3, "float16"), (8, 0, "bfloat16"), (8, 9, "float8"), (10, 0, "float4")]
    return ", ".join(["float32", *(name for major, minor, name in able if least >= (major, minor))])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _comfyui_version(folder: Path) -> str:
    try:
        found = re.search(r'__version__ = "([^"]+)"', (folder / "comfyui_version.py").read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"
