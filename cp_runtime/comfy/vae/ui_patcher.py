"""The ModelPatcher of a VAE whose weights are on the ranks, for ComfyUI's memory manager."""

from __future__ import annotations

import torch
from torch import nn

from ..forward.ui_patcher import ContextParallelPatcher
from ..memory.ui_file_pages import size_check
from ..model.ui_notes import notes_of
from ..model.ui_target import Target
from ..ranks.ui import CONTROLLER

MANY = 1 << 62


class VAEPatcher(ContextParallelPatcher):
    """A `ContextParallelPatcher` for a VAE: nothing is intercepted, and every rank holds all of its weights."""

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that a call may take: from this ComfyUI decides how many items the VAE gets at once."""
        workers = CONTROLLER.workers
        room = workers.room if workers is not None and workers.serves(self.cp_config) else None
        return MANY if room is None else room

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        if self.model.current_weight_patches_uuid is not None:  # left on a device by a node without context parallelism
            self.unpatch_model(self.offload_device)
        return self.load_on_ranks()

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        if unpatch_all:
            CONTROLLER.make_room(self.load_device, notes_of(self.model).key)
        return self.model

    def target(self) -> Target:
        """Return what the ranks' copy must equal. Raises MirrorError if its file was truncated."""
        target, notes = super().target(), notes_of(self.model)
        if notes.check_file is None:
            notes.check_file = size_check(self.model, target.path, target.recipe.stamp[0])
        notes.check_file()
        return target
