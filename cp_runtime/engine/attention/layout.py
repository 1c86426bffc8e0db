"""Positions of tokens while attention runs on a ring x ulysses mesh, and what they mean for masks. No communication.

Ulysses gathers a *chunk*: the tokens of the ranks on its axis, each of which then holds all of them for its share of the heads.
The ring passes chunks of keys and values around. With `ulysses == 1` a chunk is one rank's shard; with `ring == 1` there is one
chunk, which holds everything.

Tokens of a chunk are in gathered order (see `sharding`), so chunk after chunk is the gathered order of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from torch import Tensor

from ..sharding import JointLayout


@dataclass(frozen=True)
class ChunkLayout:
    """Chunks of one sequence.

    Args:
        layout: tokens of every rank.
        ulysses: ranks per chunk.
    """

    layout: JointLayout
    ulysses: int

    def member_lengths(self, chunk: int) -> tuple[int, ...]:
        """Return how many tokens each rank of a chunk contributes to it."""
        return self.layout.owned_lengths[chunk * self.ulysses : (chunk + 1) * self.ulysses]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every chunk."""
        return tuple(sum(self.member_lengths(chunk)) for chunk in range(self.layout.world_size // self.ulysses))

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """Position of every chunk in gathered order."""
        return tuple(slice(start, stop) for start, stop in pairwise(accumulate(self.lengths, initial=0)))


chunk_layout = lru_cache(maxsize=64)(ChunkLayout)


def in_gathered_order(mask: Tensor, layout: JointLayout, dim: int, span: slice = slice(None)) -> Tensor:
    """Return the tokens at `span` of gathered order from a mask in joint order along `dim`, as a view if possible."""
    if layout.in_order:
        return mask.movedim(dim, 0)[span].movedim(0, dim)
    return mask.index_select(dim, layout.gathered_order(mask.device)[span])
