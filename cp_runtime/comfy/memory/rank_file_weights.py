"""A rank's model whose weights are the pages of its file: they leave the device without being copied.

ComfyUI moves a model off its device by copying all of it into memory of this process, N times on N ranks, although the file holds
the same bytes. It does so to unload a model, to make room for another one, and whenever the LoRA changes. What it noted in
`ModelPatcher.backup`, as it does for weights that a LoRA changes, it takes from there instead.

For weights that stay on the host because the device has no room, it registers their memory with CUDA: the kernel then gives this
process pages of its own, because safetensors maps files privately. Those weights cross to the device unregistered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import comfy.float
import comfy.lora
import comfy.ops
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher, get_key_weight
from comfy.utils import get_attr, set_attr_param, string_to_seed
from torch import Tensor, nn

from ...compat import before_apply
from ...engine.weights.cast import memory_of
from ...engine.weights.pages import inside, mapped
from ...nested import alias, is_dressed, stored
from ..model.wire_dtypes import SMALL, STAYS
from ..model.wire_loading import parameters_of
from ..model.wire_recipe import Recipe


class LoadProgress:
    """Counts bytes of weights that are patched and there, or on their way. `tell`: told how many thousandths of a model that is,
    and None once it is loaded."""

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        self._tell = tell
        self._done = self._of = 0

    @contextlib.contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """Tell the progress of a load that happens inside the context. `nbytes`: of the model's weights."""
        self._done, self._of = 0, nbytes
        self._tell(0)
        try:
            yield
        finally:
            self._tell(None)

    def add(self, weights: Iterable[Tensor]) -> None:
        """Note that these weights are loaded."""
        self._done += sum(part.nbytes for weight in weights for part in stored(weight))
        self._tell(min(1000, 1000 * self._done // max(1, self._of)))


class Backup(NamedTuple):
    """An entry of `ModelPatcher.backup`."""

    weight: Tensor
    inplace_update: bool = False


class FileWeightsPatcher(ModelPatcher):
    """A ModelPatcher that goes back to the file's pages.

    Attributes:
        cp_recipe: by which the model was loaded.
        cp_plain: class of the patcher that its loader made.
        cp_file_weights: those weights whose memory is the file, by name.
        cp_progress: told what is on the device.
    """

    cp_recipe: Recipe
    cp_plain: type[ModelPatcher]
    cp_file_weights: dict[str, Tensor]
    cp_progress: LoadProgress

    @classmethod
    def adopt(cls, patcher: Any, recipe: Recipe, progress: LoadProgress) -> None:
        """Make `patcher`, whose model was loaded by `recipe` a moment ago, one of these."""
        patcher.cp_plain, patcher.__class__ = type(patcher), cls
        patcher.cp_recipe, patcher.cp_progress = recipe, progress
        ranges = mapped(recipe.path)
        patcher.cp_file_weights = {
            # Not the parameter itself: a module that moves to a device puts another tensor into it.
            name: alias(getattr(module, parameter))
            for name, module, parameter in parameters_of(patcher.model)
            # Scales may be copies, and are small.
            if inside(memory_of(max(stored(getattr(module, parameter)), key=lambda part: part.nbytes)), ranges)
        }

    def load(self, *args: Any, **kwargs: Any) -> None:
        for name, weight in self.cp_file_weights.items():
            self.backup.setdefault(name, Backup(alias(weight)))
        if any(patches_itself(get_attr(self.model, name)) for name in self.patches):  # also where it stays on the host
            kwargs["force_patch_weights"] = True
        with self._counted():
            super().load(*args, **kwargs)

    def patch_weight_to_device(self, key: str, device_to: Any = None, *args: Any, **kwargs: Any) -> Any:
        weight = None
        if key in self.patches:
            if patches_itself(get_attr(self.model, key)):
                weight = self._as_its_loader(key, device_to)
            elif self.cp_recipe.dynamic:
                weight = _as_dynamic(self, key, device_to)
        if weight is None:
            weight = super().patch_weight_to_device(key, device_to, *args, **kwargs)
        elif not kwargs.get("return_weight"):
            self.backup.setdefault(key, Backup(get_attr(self.model, key)))
            set_attr_param(self.model, key, weight)
        if key in self.patches and not kwargs.get("return_weight"):
            self.cp_progress.add([get_attr(self.model, key)])
        return weight

    def _as_its_loader(self, key: str, device: Any) -> Tensor:
        """Return a weight with its patches in the form that its layers expect, which the patcher of its loader knows."""
        weight, own = get_attr(self.model, key), self.__class__
        set_attr_param(self.model, key, alias(weight))  # the weight itself gets no patches
        self.__class__ = self.cp_plain
        try:
            self.patch_weight_to_device(key, device)
            made: Tensor = get_attr(self.model, key)
            return made
        finally:
            self.__class__ = own
            set_attr_param(self.model, key, weight)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Note when ComfyUI moves a module to the device. What has patches was noted when they went in."""
        own: dict[nn.Module, list[Tensor]] = {}
        for name, module, parameter in parameters_of(self.model):
            if name not in self.patches:
                own.setdefault(module, []).append(getattr(module, parameter))

        def note(module: nn.Module) -> Callable[[object], None]:
            return lambda _: self.cp_progress.add(own.pop(module, []))

        with contextlib.ExitStack() as undone:
            for module in list(own):
                undone.callback(before_apply(module, note(module)))
            yield

    def pin_weight_to_device(self, key: str) -> None:
        # A read-only mapping of the file is no way out: few drivers register one (docs/gpu.md).
        if key not in self.cp_file_weights:
            super().pin_weight_to_device(key)


def patches_itself(weight: Tensor) -> bool:
    """Return whether a weight takes patches as an attribute, and its layer applies them whenever it makes numbers of its bytes."""
    return is_dressed(weight) and hasattr(weight, "patches") and not stored(weight)[0].is_floating_point()


def _as_dynamic(patcher: Any, key: str, device: torch.device | None) -> Tensor | None:
    """Return a weight on a device with its patches as DynamicVRAM puts them in, which has loaded the model in ComfyUI's process;
    None where it patches a module as the other patchers do.

    Where it rounds a patched weight to 8 bits, it does so by the name of the module; ComfyUI's other patchers, by that of the
    weight. It keeps what it has rounded for later calls with a weight (`comfy.ops.resolve_cast_module_with_vbar`).
    """
    path, _, parameter = key.rpartition(".")
    module = get_attr(patcher.model, path)
    weight = get_key_weight(patcher.model, key)[0]
    quantised = hasattr(weight, "requantize_from_float")
    small = model_management.module_size(module) <= SMALL if quantised else STAYS in vars(module)
    if small or parameter not in ("weight", "bias") or not hasattr(module, "comfy_cast_weights"):
        return None
    device, dtype, seed = device or weight.device, patcher.model.get_dtype_inference(), string_to_seed(path)
    if isinstance(module, comfy.ops.fp8_ops.Linear) and weight.dtype == torch.float8_e4m3fn:
        dtype = model_management.lora_compute_dtype(device)
    numbers = model_management.cast_to_device(weight, device, dtype, copy=True)
    numbers = numbers.dequantize() if quantised else numbers
    made: Tensor = comfy.lora.calculate_weight(patcher.patches[key], numbers, key, intermediate_dtype=dtype)
    if quantised:
        return weight.to(device).requantize_from_float(made, scale="recalculate", stochastic_rounding=seed)
    return comfy.float.stochastic_rounding(made, weight.dtype, seed=seed)


def forget(patcher: ModelPatcher) -> None:
    """Take a model from ComfyUI's memory manager as it is: its memory is free once nothing refers to it.

    ComfyUI's own way to unload a model copies what is on the device to the host first.
    """
    loaded = model_management.current_loaded_models
    loaded[:] = [each for each in loaded if each.model is not patcher]
