"""Where code is from: ComfyUI, a node pack, a library, or Python."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

FOLLOWED = ("einops",)  # libraries that are followed like ComfyUI
COMPUTING = ("torch", "comfy_kitchen")  # others whose functions are looked at where they are used by name


def is_followed(module: str) -> bool:
    """Return whether functions are noted that are used by name of a module."""
    return is_computing(module) or not in_library(module)


def is_computing(module: str) -> bool:
    return module.partition(".")[0] in COMPUTING


@functools.lru_cache(maxsize=1 << 14)
def in_library(module: str) -> bool:
    """Return whether a module is Python's or an installed package's, other than ComfyUI."""
    top = module.partition(".")[0]
    if top in ("comfy", "comfy_extras", *FOLLOWED) or os.path.isabs(module):
        return False
    if top in COMPUTING or top in sys.stdlib_module_names or top == "":
        return True
    file = file_of(top) or file_of(module)
    return file.startswith(_library_folders())


@functools.cache
def file_of(module: str) -> str:
    """Return the file of an imported module; "" for one without."""
    return os.path.abspath(file) if (file := getattr(sys.modules.get(module), "__file__", None)) else ""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    import site

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    added = (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))  # by PYTHONPATH, or .pth
    folders = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages(), *added}
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders if folder)
