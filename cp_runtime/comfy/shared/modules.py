"""Names of classes and functions, and attributes of modules that are only bookkeeping."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from types import ModuleType
from typing import Any

LOCALS = ".<locals>."
PACKS = "custom_nodes/"  # in front of the names of packs' modules
# Settings that loaders of GGUF files put on the classes of a model's layers, for all models: on a rank each model has its own.
LOADER_SETTINGS = ("dequant_dtype", "patch_dtype")
# Records of ComfyUI's memory manager on loaded modules, and this pack's.
BOOKKEEPING = re.compile(
    "(prev_)?comfy_(force_)?(cast|patched)_weights|(weight|bias)(_lowvram)?_function|current_(patcher|weight_patches_uuid)"
    "|model_(lowvram|loaded_weight_memory|offload_buffer_memory)|lowvram_patch_counter|device|dynamic_(patchers|pins|vbars)"
    "|_v(_(signature|weight|bias|block|block_faulted))?|_vbar_get|_pins|_pin_state|_prefetch"
    f"|.*_comfy_model_dtype|context_parallel_.*|{'|'.join(LOADER_SETTINGS)}"
)


def full_name(thing: Any) -> str:
    """Return `module:qualified.name` of a class or function."""
    return f"{module_name(str(thing.__module__ or ''))}:{thing.__qualname__}"


def type_name(value: Any) -> str:
    """Name a class, or that of an object, for people."""
    return full_name(value if isinstance(value, type) else type(value)).replace(":", ".")


def module_name(module: str) -> str:
    """Return a name of a module that is the same on every computer. ComfyUI names those of its own nodes and of packs by their
    path."""
    if not os.path.isabs(module):
        return module
    folder, _, name = module.rpartition(os.sep)
    return f"comfy_extras.{name}" if os.path.basename(folder) == "comfy_extras" else PACKS + name


def modules_named(name: str) -> list[ModuleType]:
    """Return the modules with this `module_name`: ComfyUI may have imported one of its own a second time, by its path."""
    # The number of modules and the last one change with every import: only then all are looked at again.
    keys = (name, *_by_path(len(sys.modules), next(reversed(sys.modules))).get(name, ()))
    return [module for key in keys if (module := sys.modules.get(key)) is not None]


@functools.lru_cache(maxsize=1)
def _by_path(*_: object) -> dict[str, list[str]]:
    """Return the modules that are named by a path, by `module_name`. They are looked up anew when there are others."""
    found: dict[str, list[str]] = {}
    for key in filter(os.path.isabs, list(sys.modules)):
        found.setdefault(module_name(key), []).append(key)
    return found


def take_module(name: str) -> ModuleType:
    """Return a module by `module_name`; import it, if it is of ComfyUI or of a pack that is imported. Raises ImportError: there is
    none."""
    if not name.startswith(PACKS):
        return importlib.import_module(name)
    for module in modules_named(name):
        return module
    pack, dot, inner = name.partition(".")
    for module in modules_named(pack) if dot else ():
        return importlib.import_module(f"{module.__name__}.{inner}")
    raise ModuleNotFoundError(f"no module {name}")


def find(name: str) -> Any:
    """Return the class or function of that name, at the top of a module or a class."""
    module, _, path = name.partition(":")
    thing: Any = take_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing
