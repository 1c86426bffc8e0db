"""Loads a model from its recipe, with its weights in the pages of the file, which all processes of the machine share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...compat import parameter_slots, state_dict_loader
from ...engine.weights.cast import CastWeight, counting_as
from ...engine.weights.files import MAPPED, mapped_tensors
from .files import ModelFiles
from .recipe import DTYPE_OPTIONS, LOADERS, VAE_LOADERS, Factory, Recipe
from .weights import network_of, stays_as_in_file


class LoadedModel(NamedTuple):
    """A plain (not dynamic) ModelPatcher, its files, and the names of its network's weights that are missing in them."""

    patcher: Any
    missing: frozenset[str]
    files: ModelFiles


_LOADING = threading.RLock()  # two threads that load at once would restore functions in the wrong order


def load_recipe(recipe: Recipe, *, cast_later: bool = False, make: Callable[[Factory], Any] | None = None) -> LoadedModel:
    """Load a model as its loader did; its weights stay in the file's pages where dtype and shape allow.

    Args:
        cast_later: leave weights that the loader would convert in the file's pages, too, each as a `CastWeight`.
        make: calls a function of a node pack; None = no such recipes.

    Raises:
        ChangedFileError: the file is not the one that the UI process loaded.
        MirrorError: it is gone.
    """
    import comfy.sd  # picks the device, so only once that is known

    ModelFiles(recipe.files.items())
    options = {name: getattr(torch, value) if name in DTYPE_OPTIONS else value for name, value in recipe.options.items()}
    with weights_on_host(), file_backed_weights(cast_later, recipe.dynamic) as missing:
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
    files = ModelFiles(recipe.files.items())  # the names still lead to the mapped files
    return LoadedModel(patcher, frozenset(missing.get(network_of(patcher.model), ())), files)


def weights_on_host() -> contextlib.AbstractContextManager[None]:
    """Make ComfyUI create models in host memory, and return them there, inside the context.

    It would make them on the device with --highvram, or where that has more room than the host: weights there are not pages of the
    file.
    """
    from comfy import model_management

    def host(*_args: Any, **_kwargs: Any) -> torch.device:
        return torch.device("cpu")

    return replaced((model_management, "unet_inital_load_device", host), (model_management, "unet_offload_device", host))


@contextlib.contextmanager
def replaced(*functions: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace functions, each given as (module or class, name, replacement), inside the context, for all threads. A second thread
    waits until the first one has left."""
    with _LOADING, contextlib.ExitStack() as undo:
        for owner, name, function in functions:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield


@contextlib.contextmanager
def file_backed_weights(cast_later: bool = False, dynamic: bool = False) -> Iterator[Mapping[nn.Module, Sequence[str]]]:
    """Map files that ComfyUI reads in this thread, and make `load_state_dict` adopt tensors instead of copying them, inside the
    context.

    Their memory is the mapped file, so N processes share one host copy of the weights. ComfyUI copies them into memory of each
    process. Adopted are plain parameters of the same dtype and shape; all others are loaded by ComfyUI, which leaves the data of
    quantised weights in the file's pages by itself.

    Args:
        cast_later: adopt floating-point weights of another dtype as well, to be converted on use.
        dynamic: leave weights in the dtype of the file where DynamicVRAM does.

    Returns:
        the weights missing from a state dict, by the module that loaded it; filled as models are loaded.
    """
    import comfy.ops
    import comfy.utils

    ops = comfy.ops.disable_weight_init
    missing_from: dict[nn.Module, list[str]] = {}
    places: set[int] = set()  # addresses of tensors in mapped files
    plain_loaders = {state_dict_loader(cls) for cls in (nn.Module, ops.Linear, ops.Embedding)}

    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if threading.get_ident() != owner or assign:
            return original(self, state_dict, strict, assign)
        adopted = set()
        for name, module, parameter in parameters_of(self):
            on_host = getattr(module, parameter).device.type == "cpu"  # weights on a device take no host memory
            if on_host and state_dict_loader(type(module)) in plain_loaders:
                tensor, path = state_dict.get(name), name.removesuffix(parameter)
                stays = dynamic and stays_as_in_file(module, [state_dict.get(path + each) for each in parameter_slots(module)])
                if cast_later and not stays and type(tensor) is Tensor and tensor.untyped_storage().data_ptr() in places:
                    tensor = counting_as(tensor, getattr(module, parameter).dtype)
                if adopt(module, parameter, tensor, other_dtype=stays):
                    adopted.add(name)
        result = original(self, {k: v for k, v in state_dict.items() if k not in adopted}, strict=False)
        missing = [name for name in result.missing_keys if name not in adopted]
        missing_from[self] = missing
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing weights {missing[:3]}, unexpected weights {result.unexpected_keys[:3]}")
        return type(result)(missing, result.unexpected_keys)

    def load_torch_file(ckpt: str, safe_load: bool = False, device: Any = None, return_metadata: bool = False) -> Any:
        ours = threading.get_ident() == owner and ckpt.lower().endswith(MAPPED) and device is None
        if ours and not comfy.utils.DISABLE_MMAP:
            with contextlib.suppress(OSError, ValueError, SafetensorError):  # ComfyUI reports the error in the file
                tensors, metadata = mapped_tensors(ckpt)
                places.update(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
                return (tensors, metadata) if return_metadata else tensors
        return read(ckpt, safe_load=safe_load, device=device, return_metadata=return_metadata)

    with _LOADING:
        owner, original, read = threading.get_ident(), nn.Module.load_state_dict, comfy.utils.load_torch_file
        with replaced((nn.Module, "load_state_dict", load_state_dict), (comfy.utils, "load_torch_file", load_torch_file)):
            yield missing_from


def adopt(module: nn.Module, name: str, tensor: Tensor | None, *, other_dtype: bool = False) -> bool:
    """Make a plain `tensor` of the same shape, and dtype unless `other_dtype`, the parameter `name`, on any device."""
    current = getattr(module, name)
    if (
        type(tensor) not in (Tensor, nn.Parameter, CastWeight)
        or type(current) is not nn.Parameter
        or tensor is None
        or tensor.shape != current.shape
        or not (other_dtype or tensor.dtype == current.dtype)
    ):
        return False
    module.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
    return True


def parameters_of(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return (full name, module, name in the module) of every parameter."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in root.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
