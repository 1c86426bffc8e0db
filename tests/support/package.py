"""Makes `cp_runtime` importable without the checkout's root on sys.path (its `nodes/` would hide ComfyUI's `nodes.py`)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_package() -> None:
    """Load the package the way worker ranks do."""
    if "cp_runtime" in sys.modules:
        return
    load_script(ROOT / "cp_runtime" / "pool" / "rank_program.py").load_package(str(ROOT / "cp_runtime"))


def load_script(file: Path, package: str = "") -> ModuleType:
    """Import a file that is in no package, with its folder on the path meanwhile.

    Args:
        package: that its relative imports are of.
    """
    name = f"{package}.{file.stem}" if package else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    before = list(sys.path)
    try:
        sys.path.append(str(file.parent))
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        sys.path[:] = before
    return module
