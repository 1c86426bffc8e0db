"""A rank's model whose blocks' weights are shared out over the ranks (`engine.weights`).

ComfyUI's memory manager sees a model that is as large as what this rank keeps, and that is on the device or not: a part of a part
cannot stay behind. Weight patches go into a block before it is shared out, so that a rank never holds more of a model than its own
part and one block, and quantised weights stay quantised.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ...engine.collectives import RankGroup
from ...engine.weights.blocks import Block
from ...engine.weights.cast import plain, settle
from ...engine.weights.pages import give_back, mapped, trim_heap
from ...engine.weights.sharded import ShardedWeights
from ...nested import alias
from ..model.wire_loading import parameters_of
from ..model.wire_recipe import Recipe
from .rank_file_weights import Backup, FileWeightsPatcher, LoadProgress

PREFIX = "diffusion_model."
REMEDY = "Set weights to whole in CP Config, or remove the node that reads it."


class SharedWeightsPatcher(FileWeightsPatcher):
    """A ModelPatcher that keeps this rank's part of the blocks.

    Attributes:
        cp_ranks, cp_on_host: see `ShardedWeights`.
        cp_weights: the parts, while they are on the device.
        cp_size: bytes of device memory that the model takes.
    """

    cp_ranks: RankGroup
    cp_on_host: bool
    cp_weights: ShardedWeights | None
    cp_size: int

    @classmethod
    def share(cls, patcher: Any, recipe: Recipe, ranks: RankGroup, size: int, progress: LoadProgress, *, on_host: bool) -> None:
        """Make `patcher`, whose model was loaded by `recipe` a moment ago, one of these."""
        cls.adopt(patcher, recipe, progress)
        patcher.cp_ranks, patcher.cp_on_host, patcher.cp_weights, patcher.cp_size = ranks, on_host, None, size

    def model_size(self) -> int:
        return self.cp_size

    def load(self, device_to: torch.device, *args: Any, **kwargs: Any) -> None:
        weights = ShardedWeights(self.model.diffusion_model, self.cp_ranks, device_to, on_host=self.cp_on_host, remedy=REMEDY)
        self.cp_weights = weights
        own = self._load_without(weights.blocks.values(), device_to)
        pages = mapped(self.cp_recipe.path)
        for block, parameters in own.items():
            block.put([plain(weight) for weight in parameters])
            weights.keep(block.name, self._patched(block, device_to))
            give_back(parameters, pages)
            trim_heap()  # freed pieces that patching left between the weights that are kept
            self.cp_progress.add(parameters)
        self.model.model_loaded_weight_memory = self.cp_size

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights and self.cp_weights is not None:
            self.cp_weights.remove()
            self.cp_weights = None
        super().unpatch_model(device_to, unpatch_weights)

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        return 0  # ComfyUI then unloads all of it

    def _load_without(self, blocks: Collection[Block], device_to: torch.device) -> dict[Block, list[Tensor]]:
        """Have ComfyUI load the weights outside of some blocks. Return those of the blocks, whose slots are empty now."""
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
        if device_to.type == "cpu":
            settle(self.model)  # once, and not in every call
        return left_out

    def _patched(self, block: Block, device_to: torch.device) -> dict[str, Tensor]:
        """Return the weights of a block that have patches, patched."""
        names = [path for path in block.slots if PREFIX + path in self.patches]
        return {path: self.patch_weight_to_device(PREFIX + path, device_to, return_weight=True) for path in names}
