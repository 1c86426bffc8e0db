"""How a model can be loaded again: the loader ComfyUI used, the file, and plain options.

Imports ComfyUI; used in the UI process to read a recipe and on the workers to follow it.
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

from ..compat import state_dict_loader
from ..errors import MirrorError, UnsupportedError

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
_DTYPE_OPTIONS = ("dtype", "weight_dtype")
OPTIONS = (*_DTYPE_OPTIONS, "fp8_optimizations")
_DECIDED_BY_WORKER = ("load_device", "offload_device")


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


def recipe_of(patcher: Any) -> Recipe:
    """Return the recipe of a ModelPatcher. It is made once per model, when Apply Context Parallel first sees it.

    Raises:
        MirrorError: its loader left none, or one that workers do not follow.
    """
    init = patcher.cached_patcher_init
    known = getattr(patcher.model, "_cp_recipe", None)
    if known is None or known[0] is not init:
        known = init, _read_recipe(patcher)
        patcher.model._cp_recipe = known
    recipe: Recipe = known[1]
    return recipe


def _read_recipe(patcher: Any) -> Recipe:
    import comfy.sd

    init = patcher.cached_patcher_init
    name = type(patcher.model).__name__
    if init is None:
        raise MirrorError(
            f"the loader of this {name} model left no recipe (cached_patcher_init), so the workers cannot load it. "
            "Use Load Diffusion Model or Load Checkpoint."
        )
    function, args = init[0], init[1]
    loader = next((known for known in LOADERS if getattr(comfy.sd, known) is function), None)
    if loader is None:
        raise MirrorError(
            f"the loader function {function.__module__}.{function.__qualname__} is not one that the workers may call "
            f"({', '.join(LOADERS)}). Use Load Diffusion Model or Load Checkpoint."
        )
    options = args[1] if loader == LOADERS[0] else (args[6] if len(args) > 6 else {})
    plain: dict[str, Any] = {}
    for option, value in options.items():
        if option in _DECIDED_BY_WORKER or value is None:
            continue
        if option not in OPTIONS:
            raise MirrorError(f"the loader's model option {option!r} cannot be sent to the workers (allowed: {', '.join(OPTIONS)})")
        plain[option] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    path = os.path.abspath(args[0])
    return Recipe(loader, path, plain, file_stamp(path))


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
    if name not in _DTYPE_OPTIONS:
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
            for name, module, parameter in _parameters(self)
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


def _parameters(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(full name, module, name in the module) of every parameter."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in root.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two weights are stored alike; of quantised ones, data and scales."""

    def stored(weight: Tensor) -> list[Tensor]:
        flatten = getattr(weight, "__tensor_flatten__", None)  # torch's protocol for tensors that wrap others
        parts = [weight.detach()] if flatten is None else [getattr(weight, name) for name in flatten()[0]]
        return [part.cpu().contiguous().flatten().view(torch.uint8) for part in parts]

    ones, others = stored(one), stored(other)
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def share_file_pages(patcher: Any, recipe: Recipe) -> int:
    """Point the UI's own copy of plain weights at the mapped file; returns the bytes of private memory given back.

    The UI process does not compute with them, but other branches of a graph may, so they must stay valid.

    Raises:
        UnsupportedError: a weight is not the file's: another node changed it in place, and the workers do not have that.
    """
    import comfy.memory_management

    model = patcher.model
    if comfy.memory_management.aimdo_enabled or patcher.backup or model.current_weight_patches_uuid is not None:
        return 0  # mapped already, or in use by a branch that runs without context parallelism
    if not recipe.options.keys().isdisjoint(_DTYPE_OPTIONS) or not recipe.path.lower().endswith((".safetensors", ".sft")):
        return 0  # the file's pages are not the weights
    fresh = load_recipe(recipe).model.diffusion_model
    weights = dict(fresh.named_parameters())
    released = 0
    own = _parameters(model.diffusion_model)
    for name, module, parameter in own:
        current, file = getattr(module, parameter), weights.get(name)
        if file is not None and (current.dtype, current.shape) == (file.dtype, file.shape) and not same_bits(current, file):
            raise UnsupportedError(
                f"a node changed the weight {name} in place after the model was loaded, which the workers do not have. "
                "Remove that node and load the model again."
            )
    for name, module, parameter in own:
        if adopt(module, parameter, weights.get(name)):
            released += weights[name].nbytes
    return released
