"""Which tokens belong to which rank: pure arithmetic, no communication.

Every rank derives the ranges of *all* ranks from (stream lengths, world size). Therefore no collective ever carries a size,
and uneven lengths are exact.

Layout invariant: each stream (for example text, image) is split on its own, in contiguous ranges, the first `length % world`
ranks holding one token more (as `torch.tensor_split` does). What a rank holds is the concatenation of its ranges in stream
order ("local"). What an all-to-all returns is the concatenation of all locals in rank order ("gathered"). The order the
unsharded model would use is "joint". Attention without a mask does not depend on the order of keys, so nothing is
reordered; masks are brought into gathered order instead.

A stream with fewer tokens than there are ranks leaves some ranks without any. Models cannot run on an empty stream, so such a
rank holds a copy of the stream's first token, a *stand-in*: it is computed on, but never sent and never returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .errors import PlanError


def split_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part `index` when `length` items are split into `parts` contiguous parts."""
    base, extra = divmod(length, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return the size of every part of `split_range`."""
    return tuple(stop - start for start, stop in (split_range(length, parts, i) for i in range(parts)))


@dataclass(frozen=True)
class JointLayout:
    """Streams that attend to each other, and the tokens of each that every rank holds.

    Args:
        lengths: token count of each stream, in joint order.
        world_size: number of ranks the streams are split over.
    """

    lengths: tuple[int, ...]
    world_size: int

    @property
    def total(self) -> int:
        """Tokens of all streams together."""
        return sum(self.lengths)

    @cached_property
    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """`ranges[rank][stream]` = (start, stop) in joint coordinates of the tokens that the rank holds, stand-ins included."""
        offsets = (0, *accumulate(self.lengths))
        return tuple(
            tuple(
                (offset + start, offset + stop) if stop > start else (offset, offset + min(1, length))
                for offset, length in zip(offsets, self.lengths, strict=False)
                for start, stop in (split_range(length, self.world_size, rank),)
            )
            for rank in range(self.world_size)
        )

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Tokens that each rank holds, stand-ins included: what a module sees."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @cached_property
    def owned_lengths(self) -> tuple[int, ...]:
        """Tokens that each rank contributes. Their sum is the total."""
        sizes = [split_sizes(length, self.world_size) for length in self.lengths]
        return tuple(sum(stream[rank] for stream in sizes) for rank in range(self.world_size))

    def owned_positions(self, rank: int) -> Tensor | None:
        """Local positions of the tokens that `rank` contributes; None when it holds no stand-in."""
        if self.owned_lengths[rank] == self.local_lengths[rank]:
            return None
        positions, offset = [], 0
        for length, (start, stop) in zip(self.lengths, self.ranges[rank], strict=True):
            if split_sizes(length, self.world_size)[rank]:
                positions.append(torch.arange(offset, offset + stop - start))
            offset += stop - start
        return torch.cat(positions) if positions else torch.arange(0)

    @cached_property
    def gathered_order(self) -> Tensor:
        """Index tensor: position in gathered order -> position in joint order."""
        owned = []
        for rank, ranges in enumerate(self.ranges):
            for length, (start, stop) in zip(self.lengths, ranges, strict=True):
                if split_sizes(length, self.world_size)[rank]:
                    owned.append(torch.arange(start, stop))
        return torch.cat(owned)

    def take_local(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        """Return a copy of the tokens that `rank` holds from a tensor that has all tokens, in joint order, along `dim`.

        A copy, because models add to their hidden states in place.
        """
        return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]], dim)


def normalize_dim(dim: int, ndim: int) -> int:
    """Return `dim` counted from the front. Raises PlanError where there is no such dimension."""
    if not -ndim <= dim < ndim:
        raise PlanError(f"dimension: got {dim}; allowed: {-ndim} to {ndim - 1} for a tensor of {ndim}. Correct the plan.")
    return dim if dim >= 0 else dim + ndim


def clip_range(start: int, stop: int, window: tuple[int, int]) -> tuple[int, int]:
    """Intersect [start, stop) with `window` and return it relative to the start of the window (may be empty)."""
    low, high = window
    begin = min(max(start, low), high)
    return begin - low, max(begin, min(stop, high)) - low
