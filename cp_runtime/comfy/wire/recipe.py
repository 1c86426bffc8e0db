"""How a model can be loaded again: the loader ComfyUI used, the file, and plain options.

Read off a model in the UI process (`comfy.ui.recipes`), followed by the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import state_dict_loader
from ...errors import MirrorError

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
DTYPE_OPTIONS = ("dtype", "weight_dtype")
OPTIONS = (*DTYPE_OPTIONS, "fp8_optimizations")
DECIDED_BY_WORKER = ("load_device", "offload_device")


@dataclass(frozen=True)
class Recipe:
    """Everything a worker needs to load the UI's model.

    Args:
        loader: name of a function of `comfy.sd`, one of LOADERS.
        path: model file.
        options: ComfyUI's `model_options`, plain values only (`dtype` by name).
        stamp: size and time of change of the file when the UI process had loaded it.
    """

    loader: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stamp: tuple[int, int] = (0, 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> str:
        """Identifies recipe and file content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def file_stamp(path: str) -> tuple[int, int]:
    """Size and time of change of a file. Raises MirrorError when it is gone."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise MirrorError(f"the model file {path} cannot be read: {error.strerror}. Load a model that is there.") from error
    return stat.st_size, stat.st_mtime_ns


def load_recipe(recipe: Recipe) -> Any:
    """Load a model as its loader did; its weights stay in the file's pages where dtype and shape allow.

    Returns:
        a plain (not dynamic) ModelPatcher.
    """
    import comfy.sd

    if recipe.loader not in LOADERS:
        raise MirrorError(f"unknown loader {recipe.loader!r}")
    if file_stamp(recipe.path) != tuple(recipe.stamp):
        raise MirrorError(
            f"{recipe.path} changed on disk after ComfyUI had loaded it. Free ComfyUI's model and node cache, or restart it, "
            "so that it loads the new file."
        )
    options = {name: _option(name, value) for name, value in recipe.options.items()}
    with file_backed_weights():
        if recipe.loader == LOADERS[0]:
            return comfy.sd.load_diffusion_model(recipe.path, options, disable_dynamic=True)
        return comfy.sd.load_checkpoint_guess_config(
            recipe.path, output_vae=False, output_clip=False, model_options=options, disable_dynamic=True
        )[0]


def _option(name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise MirrorError(f"unknown model option {name!r}")
    if name not in DTYPE_OPTIONS:
        return value
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise MirrorError(f"unknown dtype {value!r} of model option {name!r}")
    return dtype


@contextlib.contextmanager
def file_backed_weights() -> Iterator[None]:
    """While active, `load_state_dict` in this thread adopts tensors of the state dict instead of copying them.

    safetensors hands out tensors whose memory is the mapped file, so N processes share one host copy of the weights. ComfyUI
    copies them into memory of each process. Adopted are plain parameters of the same dtype and shape; everything else takes
    ComfyUI's own way, which keeps the data of quantised weights in the file's pages by itself.
    """
    import comfy.ops

    owner, original = threading.get_ident(), nn.Module.load_state_dict
    ops = comfy.ops.disable_weight_init
    plain_loaders = {state_dict_loader(cls) for cls in (nn.Module, ops.Linear, ops.Embedding)}

    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if threading.get_ident() != owner or assign:
            return original(self, state_dict, strict, assign)
        adopted = {
            name
            for name, module, parameter in parameters_of(self)
            if state_dict_loader(type(module)) in plain_loaders and adopt(module, parameter, state_dict.get(name))
        }
        result = original(self, {k: v for k, v in state_dict.items() if k not in adopted}, strict=False)
        missing = [name for name in result.missing_keys if name not in adopted]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing weights {missing[:3]}, unexpected weights {result.unexpected_keys[:3]}")
        return type(result)(missing, result.unexpected_keys)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]


def adopt(module: nn.Module, name: str, tensor: Tensor | None) -> bool:
    """Make `tensor` the module's parameter `name` if it is a plain tensor of the same dtype, shape and device."""
    current = getattr(module, name)
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or type(current) is not nn.Parameter
        or tensor is None
        or tensor.dtype != current.dtype
        or tensor.shape != current.shape
        or tensor.device != current.device
    ):
        return False
    module.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
    return True


def parameters_of(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(full name, module, name in the module) of every parameter."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in root.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
