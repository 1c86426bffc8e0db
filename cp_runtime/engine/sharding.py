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

Two kinds of streams differ (`Split`). A stream of frames is split inside each frame, so that what a model does per frame needs
no other rank. A replicated stream is held in full by every rank, because the model cuts it by absolute lengths between blocks;
its attention is shared out as that of any other stream, and the results are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import PlanError


def split_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part `index` when `length` items are split into `parts` contiguous parts."""
    base, extra = divmod(length, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


@lru_cache(maxsize=256)
def split_ranges(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return every part of `split_range`."""
    return tuple(split_range(length, parts, i) for i in range(parts))


@lru_cache(maxsize=256)
def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return the size of every part of `split_range`."""
    return tuple(stop - start for start, stop in split_ranges(length, parts))


@dataclass(frozen=True)
class Split:
    """How one stream is split.

    Args:
        frames: runs of equal length, each split on its own.
        replicated: every rank holds all tokens, and contributes a contiguous share of them to attention.
    """

    frames: int = 1
    replicated: bool = False


CONTIGUOUS = Split()
Segment = tuple[int, int]


@dataclass(frozen=True)
class JointLayout:
    """Streams that attend to each other, and the tokens of each that every rank holds.

    Args:
        lengths: token count of each stream, in joint order.
        world_size: number of ranks the streams are split over.
        splits: how each stream is split; empty = all of them contiguously.
    """

    lengths: tuple[int, ...]
    world_size: int
    splits: tuple[Split, ...] = ()

    @cached_property
    def total(self) -> int:
        """Tokens of all streams together."""
        return sum(self.lengths)

    @cached_property
    def held(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """`held[rank][stream]` = segments (start, stop), in joint coordinates, of what the rank holds, stand-ins included."""
        return tuple(tuple(held for held, _ in self._segments(rank)) for rank in range(self.world_size))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """The same for the tokens that the rank contributes: neither stand-ins nor what others contribute of replicated ones."""
        return tuple(tuple(owned for _, owned in self._segments(rank)) for rank in range(self.world_size))

    def _segments(self, rank: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
        offsets = accumulate(self.lengths, initial=0)
        for offset, length, split in zip(offsets, self.lengths, self.splits or (CONTIGUOUS,) * len(self.lengths), strict=False):
            if length % split.frames:
                raise PlanError(f"{length} tokens are not {split.frames} frames of the same length. Correct the plan.")
            size = length // split.frames
            start, stop = split_range(size, self.world_size, rank)
            owned = tuple((offset + i * size + start, offset + i * size + stop) for i in range(split.frames) if stop > start)
            if split.replicated:
                yield ((offset, offset + length),), owned
            else:
                yield owned or tuple((offset + i * size, offset + i * size + min(1, size)) for i in range(split.frames)), owned

    def window(self, rank: int) -> Segment:
        """(start, stop) that a rank holds of the only stream. Raises PlanError when that is no single segment."""
        ((segments),) = self.held[rank]
        if len(segments) != 1:
            raise PlanError("token positions and ranges do not work on a stream that is split inside its frames. Correct the plan.")
        return segments[0]

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Tokens that each rank holds, stand-ins included: what a module sees."""
        return tuple(_count(streams) for streams in self.held)

    @cached_property
    def owned_lengths(self) -> tuple[int, ...]:
        """Tokens that each rank contributes. Their sum is the total."""
        return tuple(_count(streams) for streams in self.owned)

    def owned_positions(self, rank: int) -> Tensor | None:
        """Local positions of the tokens that `rank` contributes; None when that is all it holds."""
        if rank not in self._owned_positions:
            self._owned_positions[rank] = self._find_owned(rank)
        return self._owned_positions[rank]

    def _find_owned(self, rank: int) -> Tensor | None:
        if self.held[rank] == self.owned[rank]:
            return None
        held, owned = _positions(self.held[rank]), _positions(self.owned[rank])
        return None if torch.equal(held, owned) else torch.isin(held, owned).nonzero().flatten()

    @cached_property
    def _owned_positions(self) -> dict[int, Tensor | None]:
        return {}

    def replicated(self, rank: int) -> Iterator[tuple[slice, slice, tuple[int, ...]]]:
        """Of every replicated stream: place of its share in what the rank contributes, its place in what it holds, all shares."""
        if not self.splits:
            return
        share_at = held_at = 0
        for index, (owned, held) in enumerate(zip(self.owned[rank], self.held[rank], strict=True)):
            share, whole = _count([owned]), _count([held])
            if whole and self.splits[index].replicated:
                shares = tuple(_count([streams[index]]) for streams in self.owned)
                yield slice(share_at, share_at + share), slice(held_at, held_at + whole), shares
            share_at, held_at = share_at + share, held_at + whole

    @cached_property
    def gathered_order(self) -> Tensor:
        """Index tensor: position in gathered order -> position in joint order."""
        return torch.cat([_positions(streams) for streams in self.owned])

    @cached_property
    def _joint_order(self) -> Tensor | None:
        """Index tensor: position in joint order -> position in gathered order; None where the two are the same."""
        order = self.gathered_order
        return None if torch.equal(order, torch.arange(self.total)) else order.argsort()

    def take_local(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        """Return a copy of the tokens that `rank` holds from a tensor that has all tokens, in joint order, along `dim`.

        A copy, because models add to their hidden states in place.
        """
        return torch.cat([tensor.narrow(dim, start, stop - start) for s in self.held[rank] for start, stop in s], dim)

    def to_joint(self, tensor: Tensor, dim: int) -> Tensor:
        """Bring a tensor that has all tokens along `dim` from gathered into joint order."""
        order = self._joint_order
        return tensor if order is None else tensor.index_select(dim, order.to(tensor.device))


# A layout depends on its arguments alone. The order of a long video's tokens takes milliseconds to compute, so calls share it.
joint_layout = lru_cache(maxsize=32)(JointLayout)


def _count(streams: Iterable[Iterable[Segment]]) -> int:
    return sum(stop - start for segments in streams for start, stop in segments)


def _positions(streams: Iterable[Iterable[Segment]]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for segments in streams for start, stop in segments)])


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
