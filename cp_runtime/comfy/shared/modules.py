"""Networks that other nodes put beside the transformer (model patches), as plain data and tensors, and back.

Their loaders leave no recipe, so the module tree itself travels: class names, plain attributes and tensors. Classes are looked up
by name in torch and ComfyUI only, and their constructors are not run; nothing is pickled.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from torch import nn

from ...compat import slots
from ...errors import MirrorError

PACKAGES = ("torch.nn.modules.", "comfy.ops", "comfy.ldm.", "comfy_extras.")
LOCALS = ".<locals>."
STANDARD = frozenset(vars(nn.Module()))
# Settings that loaders of GGUF files put on the classes of a model's layers, for all models: on a rank each model has its own.
LOADER_SETTINGS = ("dequant_dtype", "patch_dtype")
# Records of ComfyUI's memory manager on loaded modules, and this pack's.
BOOKKEEPING = re.compile(
    "(prev_)?comfy_(force_)?(cast|patched)_weights|(weight|bias)(_lowvram)?_function|current_(patcher|weight_patches_uuid)"
    "|model_(lowvram|loaded_weight_memory|offload_buffer_memory)|lowvram_patch_counter|device|dynamic_.*|_(v|pin|prefetch|stream).*"
    f"|.*_comfy_model_dtype|context_parallel_.*|{'|'.join(LOADER_SETTINGS)}"
)


def encode_module(module: nn.Module) -> dict[str, Any]:
    """Encode a module and everything below it as nested dicts of plain values and tensors."""
    parameters, buffers, children = slots(module)
    plain = {k: v for k, v in vars(module).items() if k not in STANDARD and not BOOKKEEPING.fullmatch(k)}
    return {
        "class": full_name(type(module)),
        "plain": {k: ("set", sorted(v)) if isinstance(v, set) else v for k, v in plain.items()},
        "parameters": parameters,
        "buffers": buffers,
        "modules": {name: child and encode_module(child) for name, child in children.items()},
    }


def decode_module(encoded: dict[str, Any]) -> nn.Module:
    """Rebuild a module from `encode_module`. Raises MirrorError for a class that is not a module of torch or ComfyUI."""
    cls = find(encoded["class"]) if encoded["class"].startswith(PACKAGES) else None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise MirrorError(f"{encoded['class']} is not a module of torch or ComfyUI")
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in encoded["plain"].items():
        vars(module)[name] = set(value[1]) if isinstance(value, tuple) and value[:1] == ("set",) else value
    for name, tensor in encoded["parameters"].items():
        module.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    for name, tensor in encoded["buffers"].items():
        module.register_buffer(name, tensor)
    for name, child in encoded["modules"].items():
        module.add_module(name, child and decode_module(child))
    return module.eval()


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
