"""The ModelPatcher of a VAE whose weights are on the ranks, for ComfyUI's memory manager."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...pool.config import WHOLE, RuntimeConfig
from ..forward.ui_patcher import ContextParallelPatcher, executing_node, with_cancel
from ..memory.ui_residency import make_way
from ..model.ui_notes import notes_of
from ..model.ui_target import Target, demand_of
from ..model.wire_modules import layers_of
from ..model.wire_samples import sample_weights
from ..ranks.ui import CONTROLLER
from .ui_recipe import vae_recipe_of
from .wire import dtypes_of

MANY = 1 << 62


class VAEPatcher(ContextParallelPatcher):
    """A `ContextParallelPatcher` for a VAE: nothing is intercepted, and every rank holds all of its weights."""

    @staticmethod
    def config_of(config: RuntimeConfig) -> RuntimeConfig:
        """Return the config by which a VAE is kept: whole, as it is small compared with what it computes."""
        return replace(config, weights=WHOLE, memory_per_rank=0.0)

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that a call may take: from this ComfyUI decides how many items the VAE gets at once."""
        workers = CONTROLLER.workers
        room = workers.room if workers is not None and workers.serves(self.cp_config) else None
        return MANY if room is None else room

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        before, target = self.loaded_size(), self.target()
        if self.model.current_weight_patches_uuid is not None:  # left on a device by a node without context parallelism
            self.unpatch_model(self.offload_device)
        make_way(self.model)
        with_cancel(lambda cancelled: CONTROLLER.load(self.cp_config, target, executing_node(), cancelled))
        return self.loaded_size() - before

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        if unpatch_all:
            CONTROLLER.make_room(self.load_device, notes_of(self.model).key)
        return self.model

    def target(self) -> Target:
        """Return what the ranks' copy must equal. Raises MirrorError if its file was truncated."""
        recipe, notes = vae_recipe_of(self), notes_of(self.model)
        if notes.check_file is not None:
            notes.check_file()
        dtype, cast_dtype = dtypes_of(self.model)
        return self.owned(
            Target(
                recipe=recipe,
                key=recipe.key,
                path=recipe.path,
                patches=list,
                patches_uuid=str(self.patches_uuid),
                dtype=dtype,
                cast_dtype=cast_dtype,
                layers=partial(layers_of, self.model),
                samples=partial(sample_weights, self.model),
                demand=demand_of(self.model, self.model, 0.0),
            )
        )
