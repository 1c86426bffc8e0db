"""Loads a model from its recipe, with its weights in the pages of the file, which all processes of the machine share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...compat import state_dict_loader
from ...engine.weights.files import MAPPED, mapped_tensors
from ...errors import MirrorError
from .recipe import DTYPE_OPTIONS, FACTORY, LOADERS, OPTIONS, VAE_LOADERS, Factory, Recipe, file_stamp


class LoadedModel(NamedTuple):
    """A plain (not dynamic) ModelPatcher.

    Args:
        missing: names of the weights of its network that its file does not have.
        casts: the dtype that weights of its network should have, by name, where they are the file's pages all the same.
    """

    patcher: Any
    missing: frozenset[str]
    casts: Mapping[str, torch.dtype]


class FileWeights:
    """What `file_backed_weights` found, by the module that loaded a state dict."""

    def __init__(self) -> None:
        self.missing: dict[nn.Module, list[str]] = {}
        self.casts: dict[nn.Module, dict[str, torch.dtype]] = {}


def load_recipe(recipe: Recipe, *, cast_later: bool = False, make: Callable[[Factory], Any] | None = None) -> LoadedModel:
    """Load a model as its loader did; its weights stay in the file's pages where dtype and shape allow.

    Args:
        cast_later: leave weights that the loader would convert in the file's pages, too; see `LoadedModel.casts`.
        make: calls a function of a node pack; None = no such recipes.

    Raises:
        MirrorError: the file is not the one that the UI process loaded, or the recipe is not one that it makes.
    """
    import comfy.sd  # picks the device, so only once that is known

    if recipe.loader not in ((*LOADERS, *VAE_LOADERS) if recipe.factory is None or make is None else (FACTORY,)):
        raise MirrorError(f"unknown loader {recipe.loader!r}")
    _check_stamp(recipe)
    options = {name: _option(name, value) for name, value in recipe.options.items()}
    with weights_on_host(), file_backed_weights(cast_later) as found:
        if recipe.factory is not None and make is not None:
            patcher = make(recipe.factory)
        elif recipe.loader in VAE_LOADERS:
            patcher = getattr(comfy.sd, recipe.loader)(recipe.path, disable_dynamic=True)
        elif recipe.loader == LOADERS[0]:
            patcher = comfy.sd.load_diffusion_model(recipe.path, options, disable_dynamic=True)
        else:
            patcher = comfy.sd.load_checkpoint_guess_config(
                recipe.path, output_vae=False, output_clip=False, model_options=options, disable_dynamic=True
            )[0]
    _check_stamp(recipe)
    model = network_of(patcher)
    return LoadedModel(patcher, frozenset(found.missing.get(model, ())), found.casts.get(model, {}))


def network_of(patcher: Any) -> nn.Module:
    """What a ModelPatcher is about: the transformer of a diffusion model, or all of a VAE."""
    network: nn.Module = getattr(patcher.model, "diffusion_model", patcher.model)
    return network


def _check_stamp(recipe: Recipe) -> None:
    others = recipe.factory.models if recipe.factory is not None else ()
    for path, stamp in ((recipe.path, recipe.stamp), *others):
        if file_stamp(path) != tuple(stamp):
            raise MirrorError(
                f"{path} changed on disk after ComfyUI had loaded it. Free ComfyUI's model and node cache, or restart it, "
                "so that it loads the new file."
            )


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
def weights_on_host() -> Iterator[None]:
    """While active, ComfyUI makes models in host memory, and gives them back to it.

    It would make them on the device with --highvram, or where that has more room than the host: no weight there is the file's page.
    """
    from comfy import model_management

    own = {name: getattr(model_management, name) for name in ("unet_inital_load_device", "unet_offload_device")}
    for name in own:
        setattr(model_management, name, lambda *_args, **_kwargs: torch.device("cpu"))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(model_management, name, function)


@contextlib.contextmanager
def file_backed_weights(cast_later: bool = False) -> Iterator[FileWeights]:
    """While active, files that ComfyUI reads in this thread are mapped, and `load_state_dict` adopts tensors and copies none.

    Their memory is the mapped file, so N processes share one host copy of the weights. ComfyUI copies them into memory of each
    process. Adopted are plain parameters of the same dtype and shape; everything else takes ComfyUI's own way, which keeps the data
    of quantised weights in the file's pages by itself.

    Args:
        cast_later: adopt floating-point weights of another dtype as well, and note the dtype.

    Returns:
        which weights a state dict did not have, and which have another dtype; filled as models are loaded.
    """
    import comfy.ops
    import comfy.utils

    owner, original, read = threading.get_ident(), nn.Module.load_state_dict, comfy.utils.load_torch_file
    ops = comfy.ops.disable_weight_init
    found = FileWeights()
    plain_loaders = {state_dict_loader(cls) for cls in (nn.Module, ops.Linear, ops.Embedding)}

    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if threading.get_ident() != owner or assign:
            return original(self, state_dict, strict, assign)
        adopted = set()
        casts = found.casts[self] = {}
        for name, module, parameter in parameters_of(self):
            on_host = getattr(module, parameter).device.type == "cpu"  # what is on a device takes no memory of the host
            if on_host and state_dict_loader(type(module)) in plain_loaders:
                dtype = getattr(module, parameter).dtype
                if adopt(module, parameter, state_dict.get(name), any_float=cast_later):
                    adopted.add(name)
                    if getattr(module, parameter).dtype != dtype:
                        casts[name] = dtype
        result = original(self, {k: v for k, v in state_dict.items() if k not in adopted}, strict=False)
        missing = [name for name in result.missing_keys if name not in adopted]
        found.missing[self] = missing
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing weights {missing[:3]}, unexpected weights {result.unexpected_keys[:3]}")
        return type(result)(missing, result.unexpected_keys)

    def load_torch_file(ckpt: str, safe_load: bool = False, device: Any = None, return_metadata: bool = False) -> Any:
        ours = threading.get_ident() == owner and ckpt.lower().endswith(MAPPED) and device is None
        if ours and not comfy.utils.DISABLE_MMAP:
            with contextlib.suppress(OSError, ValueError, SafetensorError):  # ComfyUI says what is wrong with a file
                tensors, metadata = mapped_tensors(ckpt)
                return (tensors, metadata) if return_metadata else tensors
        return read(ckpt, safe_load=safe_load, device=device, return_metadata=return_metadata)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    comfy.utils.load_torch_file = load_torch_file
    try:
        yield found
    finally:
        comfy.utils.load_torch_file = read
        nn.Module.load_state_dict = original  # type: ignore[method-assign]


def adopt(module: nn.Module, name: str, tensor: Tensor | None, *, any_float: bool = False) -> bool:
    """Make `tensor` the module's parameter `name`, wherever that was, if it is a plain tensor of the same dtype and shape.

    Args:
        any_float: one floating-point dtype is as good as another.
    """
    current = getattr(module, name)
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or type(current) is not nn.Parameter
        or tensor is None
        or not (tensor.dtype == current.dtype or (any_float and tensor.is_floating_point() and current.is_floating_point()))
        or tensor.shape != current.shape
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
