"""A rank's model of which it has the weights of one stage (`engine.pipeline`), and those outside of blocks.

ComfyUI's memory manager sees a model that is as large as what this rank has, and that is on the device or not: without a part of
its stage nothing runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ...engine.mesh import Stage
from ...engine.pipeline.stages import StagedWeights, cut, staged_blocks
from ...engine.plan import ShardingPlan
from ...engine.sharding import Shares
from ...engine.weights.cast import plain
from ...engine.weights.pages import give_back, mapped, trim_heap
from ..model.wire_recipe import Recipe
from .rank_file_weights import LoadProgress
from .rank_shared_weights import SharedWeightsPatcher

REMEDY = "Set weights to whole in CP Config, and leave out CP PipeFusion, or remove the node that reads it."


class StagedWeightsPatcher(SharedWeightsPatcher):
    """A ModelPatcher that has the blocks of one stage.

    Attributes:
        cp_weights: its blocks and those of other stages, while they are on the device.
        cp_cut: returns them, for a device.
    """

    @classmethod
    def stage(cls, patcher: Any, recipe: Recipe, plan: ShardingPlan, stage: Stage, shares: Shares, progress: LoadProgress) -> None:
        """Make `patcher`, whose model was loaded by `recipe` a moment ago, one of these. `shares`: of every stage."""
        whole = patcher.model_size()  # by its own class
        cls.adopt(patcher, recipe, progress)
        blocks = staged_blocks(patcher.model.diffusion_model, plan)
        owners = cut([block.nbytes for block in blocks], stage.lane.size, shares)
        number = stage.lane.size - 1 - stage.lane.rank

        def weights(device: torch.device) -> StagedWeights:
            return StagedWeights(blocks, owners, number, device, REMEDY)

        others = sum(block.nbytes for block in weights(torch.device("cpu")).others)
        patcher.cp_cut, patcher.cp_weights, patcher.cp_size = weights, None, whole - others

    def load(self, device_to: torch.device, *args: Any, **kwargs: Any) -> None:
        weights = self.cp_cut(device_to)
        others = self._load_without(weights.others, device_to)
        pages = mapped(self.cp_recipe.path)
        for block, parameters in others.items():
            block.put([plain(weight) for weight in parameters])
            self.cp_progress.add(parameters)
        weights.leave_out()
        for parameters in others.values():
            give_back(parameters, pages)
        trim_heap()
        self.cp_weights = weights
        self.model.model_loaded_weight_memory = self.cp_size
