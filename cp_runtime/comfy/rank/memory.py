"""The memory of a rank: weights in memory that ComfyUI's process and all ranks map, whole, sharded or in stages; room for calls.

ComfyUI moves a model off its device by copying all of it into memory of this process, N times on N ranks, although that memory has
the same bytes. It does so to unload a model, to make room for another one, and whenever the LoRA changes. It takes weights from
`ModelPatcher.backup` instead where it has put them there, as it does for weights that a LoRA changes.

For weights that stay on the host because the device has no room, it registers their memory with CUDA. A file's pages would become
private ones of this process then, because files are mapped privately: those weights cross to the device unregistered.

Sharded or staged, a model has the size of this rank's part to ComfyUI's memory manager, and is either on the device or not: a part
of a part cannot stay behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from ...engine.pipeline.stages import StagedWeights, cut, staged_blocks
from ...engine.plan import ShardingPlan
from ...engine.ranks.collectives import RankGroup
from ...engine.ranks.mesh import Stage
from ...engine.ranks.sharding import Shares
from ...engine.weights.blocks import Block, spread
from ...engine.weights.pages import Ranges, give_back, inside
from ...engine.weights.sharded import ShardedWeights
from ...nested import alias, is_plain_storage_subclass, stored
from ...system import system
from ..shared.patches import changes_shape
from ..shared.values import Facts, Model
from ..shared.weights import PREFIX, SMALL, STAYS, network_of, parameters_of

# Remedy for code that reads a weight absent from this rank.
SHARDED_REMEDY = "Set weights to whole in CP Config, or remove the node that reads it."
STAGED_REMEDY = "Set weights to whole in CP Config, and leave out CP PipeFusion, or remove the node that reads it."


class LoadProgress:
    """Bytes of patched weights on the device or in flight. `tell` gets thousandths of the model, and None once it is loaded."""

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        self._tell = tell
        self._done = self._of = 0

    @contextlib.contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """Report the progress of a load inside the context. `nbytes`: of the model's weights."""
        self._done, self._of = 0, nbytes
        self._tell(0)
        try:
            yield
        finally:
            self._tell(None)

    def add(self, weights: Iterable[Tensor]) -> None:
        self._done += sum(part.nbytes for weight in weights for part in stored(weight))
        self._tell(min(1000, 1000 * self._done // max(1, self._of)))


class Backup(NamedTuple):
    weight: Tensor
    inplace_update: bool = False


def patcher_over(network: nn.Module, kind: Any, settings: Mapping[str, Any], facts: Facts, device: torch.device) -> Any:
    """Return a patcher over a network from ComfyUI's process. `kind`, `settings`: of the one there, ComfyUI's or a node pack's."""
    made = kind.__new__(kind)
    ModelPatcher.__init__(made, network if facts.is_vae else Model(network, facts), device, torch.device("cpu"))
    vars(made).update(settings)
    return made


def range_of(buffer: Any) -> tuple[int, int]:
    """Return (first address, address after the last) of memory that this process maps."""
    pages = torch.frombuffer(buffer, dtype=torch.uint8)
    return pages.data_ptr(), pages.data_ptr() + pages.numel()


class Pages(NamedTuple):
    """Memory that this process and ComfyUI's map: all of it, and the part that belongs to no file."""

    mapped: Ranges
    shared: Ranges


class MappedWeightsPatcher(ModelPatcher):
    """A ModelPatcher that goes back to the memory which all ranks map.

    Attributes:
        cp_plain: class of the model's patcher in ComfyUI's process.
        cp_facts: of the model.
        cp_pages: that memory.
        cp_mapped: weights there, by name.
        cp_progress: counts the bytes on the device.
    """

    cp_plain: type[ModelPatcher]
    cp_facts: Facts
    cp_pages: Pages
    cp_mapped: dict[str, Tensor]
    cp_progress: LoadProgress

    @classmethod
    def adopt(cls, patcher: Any, pages: Pages, facts: Facts, progress: LoadProgress) -> None:
        """Turn a new patcher into this class."""
        patcher.cp_plain, patcher.__class__ = type(patcher), cls
        patcher.cp_pages, patcher.cp_facts, patcher.cp_progress = pages, facts, progress
        patcher.cp_mapped = {
            # Not the parameter itself: a module that moves to a device puts another tensor into it.
            name: alias(getattr(module, parameter))
            for name, module, parameter in parameters_of(patcher.model)
            # Scales may be copies, and are small.
            if inside(max(stored(getattr(module, parameter)), key=lambda part: part.nbytes), pages.mapped)
        }

    def load(self, *args: Any, **kwargs: Any) -> None:
        for name, weight in self.cp_mapped.items():
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
            elif self.cp_facts.dynamic:
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
        """Return a patched weight in the form that its layers expect, which its loader's patcher knows."""
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
        """Count the modules that ComfyUI moves to the device. Patched weights were counted when patched."""
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
        if key not in self.cp_mapped or inside(stored(self.cp_mapped[key])[0], self.cp_pages.shared):
            super().pin_weight_to_device(key)


def patches_itself(weight: Tensor) -> bool:
    """Return whether a weight takes patches as an attribute, and its layer applies them whenever it dequantises it."""
    return is_plain_storage_subclass(weight) and hasattr(weight, "patches") and not stored(weight)[0].is_floating_point()


def _as_dynamic(patcher: Any, key: str, device: torch.device | None) -> Tensor | None:
    """Return a weight on a device, patched as DynamicVRAM does, which has loaded the model in ComfyUI's process; None where it
    patches a module like the other patchers.

    Where it rounds a patched weight to 8 bits, it seeds that by the name of the module; ComfyUI's other patchers, by that of the
    weight. It keeps the rounded result for later calls with a weight (`comfy.ops.resolve_cast_module_with_vbar`).
    """
    path = key.rpartition(".")[0]
    module = get_attr(patcher.model, path)
    weight = get_key_weight(patcher.model, key)[0]
    quantised = hasattr(weight, "requantize_from_float")
    small = model_management.module_size(module) <= SMALL if quantised else STAYS in vars(module)
    own = [f"{path}.{name}" for name in ("weight", "bias")]
    if small or key not in own or not hasattr(module, "comfy_cast_weights"):
        return None
    if any(changes_shape(patcher, name) for name in own if name in patcher.patches):
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
    """Remove a model from ComfyUI's memory manager as it is: its memory is freed with the last reference.

    ComfyUI's own unload copies device memory to the host first.
    """
    loaded = model_management.current_loaded_models
    loaded[:] = [each for each in loaded if each.model is not patcher]


class PartialWeightsPatcher(MappedWeightsPatcher):
    """A ModelPatcher with the weights outside of blocks, and some blocks: `cp_size` bytes, on the device if `cp_there`."""

    cp_size: int
    cp_there = False

    def model_size(self) -> int:
        return self.cp_size

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        return 0  # ComfyUI then unloads all of it

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights and self.cp_there:
            self._remove()
            self.cp_there = False
        super().unpatch_model(device_to, unpatch_weights)

    def _remove(self) -> None:
        raise NotImplementedError

    def _load_without(self, blocks: Collection[Block], device_to: torch.device) -> dict[Block, list[Tensor]]:
        """Have ComfyUI load the weights outside of some blocks. Empty the slots of these blocks, and return their weights."""
        left_out = {block: block.weights for block in blocks}
        inner = {module for block in left_out for module in block.module.modules()}
        for name, module, parameter in parameters_of(self.model):
            if module in inner:
                self.backup.setdefault(name, Backup(alias(getattr(module, parameter))))
        for block in left_out:
            block.clear()
        elsewhere = {PREFIX + path for block in left_out for path in block.slots}
        patches = self.patches  # type: ignore[has-type]
        self.patches = {name: entries for name, entries in patches.items() if name not in elsewhere}
        try:
            super().load(device_to, full_load=True)
        finally:
            self.patches = patches
        self.model.model_loaded_weight_memory, self.cp_there = self.cp_size, True
        return left_out


class ShardedWeightsPatcher(PartialWeightsPatcher):
    """A ModelPatcher with this rank's shard of every block, or of some (`engine.weights`).

    Weight patches go into a block before it is sharded, so a rank never holds more of a model than its shards and one block, and
    quantised weights stay quantised.

    Attributes:
        cp_ranks, cp_on_host: see `ShardedWeights`.
        cp_shared: number of these blocks, the others stay whole; 0 = all.
        cp_shards: the shards, while they are on the device.
    """

    cp_ranks: RankGroup
    cp_on_host: bool
    cp_shared: int
    cp_shards: ShardedWeights | None

    def shard(self, ranks: RankGroup, size: int, shared: int = 0, *, on_host: bool) -> None:
        """Set what `load` needs to know, after `adopt`. `size`: see `cp_size`; `shared`: see `cp_shared`."""
        self.cp_ranks, self.cp_on_host, self.cp_shards, self.cp_size, self.cp_shared = ranks, on_host, None, size, shared

    def load(self, device_to: torch.device, *args: Any, **kwargs: Any) -> None:
        shards = ShardedWeights(network_of(self.model), self.cp_ranks, device_to, on_host=self.cp_on_host, remedy=SHARDED_REMEDY)
        self.cp_shards = shards
        blocks = list(shards.blocks.values())
        own = self._load_without(spread(blocks, self.cp_shared) if self.cp_shared else blocks, device_to)
        for block, parameters in own.items():
            block.put(parameters)
            shards.keep(block.name, self._patched(block, device_to))
            give_back(parameters, self.cp_pages.mapped)
            system.trim_heap()  # free the gaps that patching left between the remaining weights
            self.cp_progress.add(parameters)

    def _remove(self) -> None:
        if self.cp_shards is not None:
            self.cp_shards.remove()
        self.cp_shards = None

    def _patched(self, block: Block, device_to: torch.device) -> dict[str, Tensor]:
        """Return the patched weights of a block."""
        names = [path for path in block.slots if PREFIX + path in self.patches]
        return {path: self.patch_weight_to_device(PREFIX + path, device_to, return_weight=True) for path in names}


class StagedWeightsPatcher(PartialWeightsPatcher):
    """A ModelPatcher that has the blocks of one stage (`engine.pipeline`).

    Attributes:
        cp_stage: its blocks and those of other stages, while they are on the device.
        cp_cut: returns them, for a device.
    """

    cp_stage: StagedWeights | None
    cp_cut: Callable[[torch.device], StagedWeights]

    @classmethod
    def stage(
        cls, patcher: Any, pages: Pages, facts: Facts, plan: ShardingPlan, stage: Stage, shares: Shares, progress: LoadProgress
    ) -> None:
        """Turn a new patcher into this class. `shares`: of every stage."""
        whole = patcher.model_size()  # by its own class
        cls.adopt(patcher, pages, facts, progress)
        blocks = staged_blocks(patcher.model.diffusion_model, plan)
        owners = cut([block.nbytes for block in blocks], stage.pipeline_group.size, shares)
        number = stage.pipeline_group.size - 1 - stage.pipeline_group.rank

        def weights(device: torch.device) -> StagedWeights:
            return StagedWeights(blocks, owners, number, device, STAGED_REMEDY)

        others = sum(block.nbytes for block in weights(torch.device("cpu")).others)
        patcher.cp_cut, patcher.cp_stage, patcher.cp_size = weights, None, whole - others

    def load(self, device_to: torch.device, *args: Any, **kwargs: Any) -> None:
        weights = self.cp_cut(device_to)
        others = self._load_without(weights.others, device_to)
        for block, parameters in others.items():
            block.put(parameters)
            self.cp_progress.add(parameters)
        weights.leave_out()
        for parameters in others.values():
            give_back(parameters, self.cp_pages.mapped)
        system.trim_heap()
        self.cp_stage = weights

    def _remove(self) -> None:
        if self.cp_stage is not None:
            self.cp_stage.remove()
        self.cp_stage = None


def room(device: torch.device) -> int | None:
    """Return the bytes that a call could take if all weights made way for it; None for a CPU, whose memory ComfyUI's process sees
    as well.

    Sharded weights do not make way: the model cannot run without them. ComfyUI would rather move weights to the host than compute
    CFG halves one after the other: `ModelPatcher.get_free_memory` counts DynamicVRAM's memory as free.
    """
    if device.type == "cpu":
        return None
    can_go = (each.model_loaded_memory() for each in _on(device) if not getattr(each.model, "cp_there", False))
    return max(0, int(model_management.get_free_memory(device) + sum(can_go)))  # below 0 with `--reserve-vram`


def available(device: torch.device) -> int | None:
    """Return the bytes for a model and its calls if all others were unloaded, less ComfyUI's reserve; None for a CPU."""
    if device.type == "cpu":
        return None
    held = sum(each.model_loaded_memory() for each in _on(device))
    return max(0, int(model_management.get_free_memory(device) + held - model_management.minimum_inference_memory()))


def _on(device: torch.device) -> list[Any]:
    return [each for each in model_management.current_loaded_models if each.device == device]
