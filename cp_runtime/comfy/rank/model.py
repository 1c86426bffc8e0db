"""One model on a worker rank, and the state that its calls leave there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ...compat import compiler_counts
from ...engine.compiled import CompiledBlocks, CompileSettings, Failed
from ...engine.hooks import InstalledPlan
from ...engine.pipeline.pipeline import Pipeline
from ...engine.pipeline.stages import StagedWeights, Stages
from ...engine.ranks.collectives import RankGroup
from ...engine.ranks.mesh import Stage
from ...engine.weights.sharded import ShardedWeights
from ...families import plan_for
from ...families.family import FamilyPlan
from ...pool.messages import Compiled
from ..shared.weights import network_of
from .files import MappedFile
from .memory import forget, room


@dataclass
class Mirror:
    """One model on this rank.

    Args:
        names: of all its weights.
        placement: of its weights, one of `pool.settings.PLACEMENTS`.
        nbytes: of its weights.
        formats: quantised formats with native multiplication on this device.
        cast: layers that it could multiply natively, too, but casts as other ranks do.
        classes: of its modules.
        files: with weights of it, that this rank maps by itself.
        shared: blocks of which every rank has a part, see `Load`.
        reserved: bytes of device memory left free for calls at the last move of its weights there.
        compiled: its blocks, where calls ask for that.
    """

    patcher: Any
    names: frozenset[str]
    placement: str
    nbytes: int
    formats: tuple[str, ...]
    classes: frozenset[type]
    files: Sequence[MappedFile] = ()
    cast: Sequence[nn.Module] = ()
    shared: int = 0
    reserved: float = 0.0
    compiled: CompiledBlocks | None = None
    _pipeline: tuple[Any, Pipeline] | None = None  # and its weights

    @cached_property
    def model(self) -> nn.Module:
        network: nn.Module = network_of(self.patcher.model)
        return network

    @cached_property
    def installed(self) -> InstalledPlan[FamilyPlan]:
        """Its plan, from the first call on."""
        return InstalledPlan(self.model, plan_for(self.model))

    @property
    def weights(self) -> ShardedWeights | None:
        """Sharded weights, once they are on the device."""
        weights: ShardedWeights | None = getattr(self.patcher, "cp_shards", None)
        return weights

    def pipeline(self, stage: Stage, everyone: RankGroup, device: torch.device) -> Pipeline:
        """Return its pipeline, new whenever its weights are put on the device again."""
        weights: StagedWeights = self.patcher.cp_stage
        if self._pipeline is None or self._pipeline[0] is not weights:
            stages = Stages(weights.blocks, weights.owners, stage.pipeline_group, weights.lent)
            self._pipeline = weights, Pipeline(stages, everyone, partial(room, device))
        return self._pipeline[1]

    def free_buffers(self) -> None:
        """Free memory that its next call can do without."""
        if self.weights is not None:
            self.weights.free_buffers()
        if self._pipeline is not None:
            self._pipeline[1].forget()

    def compile(self, settings: CompileSettings | None, failed: Failed) -> None:
        """Compile the blocks from now on, or stop. See `CompiledBlocks`."""
        if self.compiled is not None and self.compiled.settings != settings:
            self.compiled.remove()
            self.compiled = None
        if self.compiled is None and settings is not None:
            self.compiled = CompiledBlocks(self.model, self.installed.plan, settings)
        if self.compiled is not None:
            self.compiled.failed = failed

    @property
    def compilation(self) -> Compiled:
        """The compiled blocks, and this process's compilations so far."""
        blocks = self.compiled
        return Compiled() if blocks is None else Compiled(kinds=blocks.kinds, left=blocks.left, counts=compiler_counts())

    def drop(self) -> None:
        """Remove the plan, with its transforms' cached values, and compiled code."""
        if self.compiled is not None:
            self.compiled.remove()
        if "installed" in vars(self):
            self.installed.remove()
        forget(self.patcher)
