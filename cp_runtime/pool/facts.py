"""Versions that two computers must have in common to compute one picture. Needs no library."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from pathlib import Path

PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "comfy-kitchen")
MISSING = "not installed"
_RUNTIME = Path(__file__).parents[1]


def facts_of(comfyui: str) -> dict[str, str]:
    """Return versions on this computer by name, and a digest of this package's own code. `comfyui`: folder of ComfyUI; empty =
    none."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {"this pack": _digest(), "ComfyUI": _comfyui_version(Path(comfyui)) if comfyui else MISSING, **versions}


def _digest() -> str:
    found = hashlib.sha256()
    for path in sorted(_RUNTIME.rglob("*.py")):
        found.update(f"{path.relative_to(_RUNTIME).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _comfyui_version(folder: Path) -> str:
    try:
        found = re.search(r'__version__ = "([^"]+)"', (folder / "comfyui_version.py").read_text())
    except OSError:
        found = None
    return found[1] if found else MISSING
