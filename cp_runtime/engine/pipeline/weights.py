"""The weights of a model of which a rank holds one stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..weights.blocks import Block
from ..weights.packing import Packing


class StagedWeights:
    """The blocks of a model, of which this rank has the weights of one stage only.

    Args:
        blocks, owners: as for `Stages`.
        stage: of this rank.
        device: where the model computes.
        remedy: advice to a user whose model cannot run like this; part of messages.
    """

    def __init__(self, blocks: Sequence[Block], owners: list[int], stage: int, device: torch.device, remedy: str) -> None:
        self.blocks, self.owners, self.stage = blocks, owners, stage
        self._device, self._remedy = device, remedy
        self._packings: dict[str, Packing] = {}

    @property
    def others(self) -> list[Block]:
        """The blocks of the other stages."""
        return [block for block, owner in zip(self.blocks, self.owners, strict=True) if owner != self.stage]

    def leave_out(self) -> None:
        """Let go of the weights of other stages' blocks. What asks for their numbers is refused from now on."""
        for block in self.others:
            self._packings[block.name] = Packing(block.weights)
            self._put_absent(block)

    @contextlib.contextmanager
    def lent(self, block: Block) -> Iterator[None]:
        """Give a block of another stage zeros for weights while active."""
        packing = self._packings.get(block.name)
        if packing is None:
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            block.put(packing.views(torch.zeros(packing.nbytes, dtype=torch.uint8, device=self._device)))
        try:
            yield
        finally:
            self._put_absent(block)

    def _put_absent(self, block: Block) -> None:
        with torch.inference_mode(False), torch.no_grad():
            block.put(self._packings[block.name].absent(self._device, list(block.slots), self._remedy))

    def remove(self) -> None:
        """Let go of everything. The blocks of other stages have no weights, until somebody fills their slots."""
        self._packings.clear()
