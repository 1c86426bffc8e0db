"""Makes `cp_runtime` importable without the checkout's root on sys.path (its `nodes/` would hide ComfyUI's `nodes.py`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_package() -> None:
    """Load the package the way worker ranks do."""
    if "cp_runtime" in sys.modules:
        return
    path = ROOT / "cp_runtime" / "pool" / "fork_server.py"
    spec = importlib.util.spec_from_file_location("cp_fork_server", path)
    assert spec is not None
    assert spec.loader is not None
    fork_server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fork_server)
    fork_server.load_package(str(ROOT / "cp_runtime"))
