"""Names of classes and functions, and what modules hold besides what they compute with."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

LOCALS = ".<locals>."
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


def module_name(module: str) -> str:
    """Return the name by which a module is imported. ComfyUI names the modules of its own nodes by their path."""
    extras = module.find("comfy_extras" + os.sep)
    return module[extras:].replace(os.sep, ".") if extras >= 0 and os.path.isabs(module) else module


def find(name: str) -> Any:
    """Return the class or function of that name, at the top of a module or a class."""
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing
