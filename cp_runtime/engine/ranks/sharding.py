"""Which tokens, and which items of a batch, belong to which rank: arithmetic.

Every rank derives the ranges of *all* ranks from (stream lengths, world size, shares). Therefore no collective ever carries a size,
and uneven lengths are exact.

Layout invariant: each stream (for example text, image) is split separately, into contiguous ranges, and the first `length % world`
ranks hold one token more (as in `torch.tensor_split`). With *shares*, such as (2, 1) for a rank that is twice as fast as the other,
ranks hold tokens in proportion, unless some would then have none although there are enough for all. A rank holds the concatenation
of its ranges in stream order ("local"). An all-to-all returns the concatenation of all locals in rank order ("gathered"). The
unsharded model would use "joint" order. Attention without a mask does not depend on the order of keys, so tokens are not reordered;
masks are brought into gathered order instead.

If a stream has fewer tokens than there are ranks, some ranks get none. Models cannot run on an empty stream, so such a rank holds a
copy of the stream's first token, a *stand-in*, which it computes on but never sends or returns.

Two kinds of streams differ (`Split`). A stream of frames is split inside each frame, so that per-frame operations need no other
rank. A replicated stream is held in full by every rank, because the model slices it by absolute lengths between blocks; its
attention is shared out like that of any other stream, and the results are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import PlanError
from ...nested import map_tensors

Segment = tuple[int, int]
Shares = tuple[int, ...]
"""Relative amounts of work of some ranks; empty = equal."""


@lru_cache(maxsize=256)
def split_sizes(length: int, parts: int, shares: Shares = ()) -> tuple[int, ...]:
    """Return the number of items in each part, out of `length`, in proportion to its share.

    Uses D'Hondt's method: each item goes to the part with the lowest (items + 1) / share, the first one on a tie. This minimises
    the largest items / share; with equal shares it equals `torch.tensor_split`.
    """
    weights = shares or (1,) * parts
    sizes = [length * weight // sum(weights) for weight in weights]  # a lower bound for D'Hondt's method
    for _ in range(length - sum(sizes)):
        sizes[min(range(parts), key=lambda part: (sizes[part] + 1) / weights[part])] += 1
    return tuple(sizes)


@lru_cache(maxsize=256)
def split_ranges(length: int, parts: int, shares: Shares = ()) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of every part, in order. See `split_sizes`."""
    return tuple(pairwise(accumulate(split_sizes(length, parts, shares), initial=0)))


MAX_OVERLOAD = 1.1  # a group may get this many times its share


def batch_groups(items: int, ranks: int, degree: int, sequence: bool, group_shares: Callable[[int], Shares]) -> int:
    """Return the number of groups of ranks that share a batch out.

    Args:
        degree: the user's setting; 0 = choose.
        sequence: whether the ranks of a group can share a sequence. If so, there are as many groups as divide the batch. If not,
            only the batch can be shared, and groups may be of uneven sizes.
        group_shares: number of groups -> their shares. Groups with unequal shares must get nearly proportional items.
    """
    most = min(degree or ranks, ranks)  # a call may take fewer ranks than there are groups by the setting
    if not sequence:
        return most
    able = (n for n in range(1, most + 1) if not ranks % n and not most % n and _is_fair(items, n, group_shares(n)))
    return max(able, default=1)


def _is_fair(items: int, groups: int, shares: Shares) -> bool:
    """Return whether no group gets (much) more of the items than its share."""
    parts = zip(split_sizes(items, groups, shares), shares or (1,) * groups, strict=True)
    return max(own / share for own, share in parts) * (sum(shares) or groups) <= items * (MAX_OVERLOAD if shares else 1)


def in_rounds(sizes: Sequence[int], ranks: int, shares: Shares = ()) -> list[list[list[int]]]:
    """Assign pieces to rounds that the ranks compute side by side: for every round the indices of each rank's pieces.

    A round has as few pieces as can be shared out fairly: with equal shares one per rank. The largest pieces come first, so that
    pieces of a round are similar in size and no rank waits long for another.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    each = next((n for n in range(ranks, len(sizes)) if _is_fair(n, ranks, shares)), max(ranks, len(sizes)))
    rounds = [order[first : first + each] for first in range(0, len(order), each)]
    return [[now[start:stop] for start, stop in split_ranges(len(now), ranks, shares)] for now in rounds]


@dataclass(frozen=True)
class Split:
    """The split of one stream.

    Args:
        frames: number of equally long runs, each split separately.
        replicated: every rank holds all tokens, and contributes a contiguous share of them to attention.
        unit: number of tokens that stay together, such as those of a row of a picture.
        least: minimum of units per rank; with fewer, only the first ranks have any.
    """

    frames: int = 1
    replicated: bool = False
    unit: int = 1
    least: int = 1

    def ranges(self, tokens: int, ranks: int, shares: Shares) -> list[Segment]:
        """Return (start, stop) of the tokens of a frame that each rank contributes. Shares count as far as all get the least."""
        units = tokens // self.unit
        parts = max(1, min(ranks, units // self.least))
        ranges = split_ranges(units, parts, shares[:parts])
        if min(stop - start for start, stop in ranges) < self.least:
            ranges = split_ranges(units, parts)
        return [(start * self.unit, stop * self.unit) for start, stop in (*ranges, *[(0, 0)] * (ranks - parts))]


CONTIGUOUS = Split()


@dataclass(frozen=True)
class JointLayout:
    """Streams that attend to each other, and the tokens of each that every rank holds.

    Args:
        lengths: token count of each stream, in joint order.
        world_size: number of ranks that the streams are split over.
        splits: how each stream is split; empty = all of them contiguously.
        shares: share of each rank; empty = equal shares.
    """

    lengths: tuple[int, ...]
    world_size: int
    splits: tuple[Split, ...] = ()
    shares: Shares = ()

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def divided(self) -> tuple[int, ...]:
        """Token counts of the streams that are not replicated."""
        splits = self.splits or (CONTIGUOUS,) * len(self.lengths)
        return tuple(length for length, split in zip(self.lengths, splits, strict=True) if not split.replicated)

    @cached_property
    def held(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """`held[rank][stream]`: segments (start, stop) that the rank holds, in joint coordinates, stand-ins included."""
        return tuple(tuple(held for held, _ in self._segments(rank)) for rank in range(self.world_size))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """Like `held`, but only tokens that the rank contributes: no stand-ins, and only its share of replicated streams."""
        return tuple(tuple(owned for _, owned in self._segments(rank)) for rank in range(self.world_size))

    def _segments(self, rank: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
        offsets = accumulate(self.lengths, initial=0)
        for offset, length, split in zip(offsets, self.lengths, self.splits or (CONTIGUOUS,) * len(self.lengths), strict=False):
            if length % (split.frames * split.unit):
                raise PlanError(f"{length} tokens are not {split.frames} frames of the same length. Correct the plan.")
            size = length // split.frames
            start, stop = split.ranges(size, self.world_size, self.shares)[rank]
            starts = range(offset, offset + length, size) if length else [offset] * split.frames
            owned = tuple((at + start, at + stop) for at in starts if stop > start)
            if split.replicated:
                yield ((offset, offset + length),), owned
            else:
                yield owned or tuple((at, at + min(split.least * split.unit, size)) for at in starts), owned

    def window(self, rank: int) -> Segment:
        """Return (start, stop) that a rank holds of the only stream. Raises PlanError unless that is a single segment."""
        ((segments),) = self.held[rank]
        if len(segments) != 1:
            raise PlanError("token positions and ranges do not work on a stream that is split inside its frames. Correct the plan.")
        return segments[0]

    def contributed(self, rank: int) -> Segment:
        """Return (start, stop) that a rank contributes to the only stream, which is not split inside frames; may be empty."""
        ((segments),) = self.owned[rank]
        return segments[0] if segments else (0, 0)

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Number of tokens that each rank holds, stand-ins included: the length that a module sees."""
        return tuple(_count(streams) for streams in self.held)

    @cached_property
    def owned_lengths(self) -> tuple[int, ...]:
        """Number of tokens that each rank contributes; they add up to the total."""
        return tuple(_count(streams) for streams in self.owned)

    def owned_positions(self, rank: int, device: torch.device) -> Tensor | None:
        """Return the local positions of the tokens that `rank` contributes; None if it contributes all it holds."""
        if self.owned_lengths[rank] == self.local_lengths[rank]:
            return None
        return self._index(("owned", rank), device, self._owned_segments(rank))

    def _owned_segments(self, rank: int) -> Iterator[Segment]:
        """Yield the segments that `rank` contributes, relative to its held tokens."""
        at = 0
        for held, owned in zip(self.held[rank], self.owned[rank], strict=True):
            for start, stop in held:
                yield from ((at + a - start, at + b - start) for a, b in owned if start <= a and b <= stop)
                at += stop - start

    def replicated(self, rank: int) -> Iterator[tuple[slice, slice, tuple[int, ...]]]:
        """Yield, per replicated stream: slice of its share in the rank's contribution, its slice in the rank's tokens, shares."""
        if not any(split.replicated for split in self.splits):
            return
        share_at = held_at = 0
        for index, (owned, held) in enumerate(zip(self.owned[rank], self.held[rank], strict=True)):
            share, whole = _count([owned]), _count([held])
            if whole and self.splits[index].replicated:
                shares = tuple(_count([streams[index]]) for streams in self.owned)
                yield slice(share_at, share_at + share), slice(held_at, held_at + whole), shares
            share_at, held_at = share_at + share, held_at + whole

    def positions(self, ranks: Sequence[int], device: torch.device, *, held: bool = False) -> Tensor:
        """Return the joint positions of the tokens that some ranks contribute, or hold, one rank after the other."""
        runs = [segment for rank in ranks for segments in (self.held if held else self.owned)[rank] for segment in segments]
        return self._index((tuple(ranks), held), device, runs)

    def gathered_order(self, device: torch.device) -> Tensor:
        """Return an index tensor that maps positions in gathered order to positions in joint order."""
        return self._index("gathered", device, self._gathered_segments())

    def _gathered_segments(self) -> Iterator[Segment]:
        return (segment for rank in self.owned for segments in rank for segment in segments)

    @cached_property
    def in_order(self) -> bool:
        """Whether gathered order is joint order."""
        return all(a[1] == b[0] for a, b in pairwise((start, stop) for start, stop in self._gathered_segments() if stop > start))

    def _index(self, name: object, device: torch.device, segments: Iterable[Segment]) -> Tensor:
        """Return the positions in some segments, cached. They are made on the device, so that the host need not wait."""
        if (name, device) not in self._indices:
            parts = [torch.arange(start, stop, device=device) for start, stop in segments]
            self._indices[name, device] = torch.cat([torch.arange(0, device=device), *parts])
        return self._indices[name, device]

    @cached_property
    def _indices(self) -> dict[tuple[object, torch.device], Tensor]:
        return {}

    def take_local(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        """Copy the tokens that `rank` holds out of a tensor with all tokens, in joint order, along `dim`.

        It is a copy because models modify their hidden states in place.
        """
        return torch.cat([tensor.narrow(dim, start, stop - start) for s in self.held[rank] for start, stop in s], dim)

    def to_gathered(self, tensor: Tensor, dim: int, span: slice = slice(None)) -> Tensor:
        """Return the tokens at `span` of gathered order of a tensor in joint order along `dim`, as a view if possible."""
        if self.in_order:
            return tensor.movedim(dim, 0)[span].movedim(0, dim)
        return tensor.index_select(dim, self.gathered_order(tensor.device)[span])

    def to_joint(self, tensor: Tensor, dim: int) -> Tensor:
        """Reorder a tensor with all tokens along `dim` from gathered into joint order."""
        if self.in_order:
            return tensor
        key = ("joint", tensor.device)
        if key not in self._indices:
            self._indices[key] = self.gathered_order(tensor.device).argsort()
        return tensor.index_select(dim, self._indices[key])


# Shared by calls: computing the order of a long video's tokens takes milliseconds.
joint_layout = lru_cache(maxsize=32)(JointLayout)


@lru_cache(maxsize=64)
def chunk_spans(layout: JointLayout, ulysses: int) -> tuple[slice, ...]:
    """Return the positions in gathered order of every *chunk*: the tokens of `ulysses` neighbouring ranks."""
    return tuple(slice(start, stop) for start, stop in pairwise([*accumulate(layout.owned_lengths, initial=0)][::ulysses]))


def _count(streams: Iterable[Iterable[Segment]]) -> int:
    return sum(stop - start for segments in streams for start, stop in segments)


def clip_range(start: int, stop: int, window: tuple[int, int]) -> tuple[int, int]:
    """Intersect [start, stop) with `window`; return the result, which may be empty, relative to the start of the window."""
    low, high = window
    begin = min(max(start, low), high)
    return begin - low, max(begin, min(stop, high)) - low


@dataclass(frozen=True)
class BatchShares:
    """The assignment of a call's items to groups of ranks.

    Args:
        groups: number of groups, each of which computes some items.
        items: size of dimension 0 of the stacked tensors.
        unit: number of items that belong together, as the frames of a video where they are stacked.
        stacked: names of the stacked arguments.
        shares: share of each group; empty = equal shares.
    """

    groups: int
    items: int
    unit: int
    stacked: frozenset[str]
    shares: Shares = ()

    def owned(self, group: int) -> tuple[int, int]:
        """Return (start, stop) of the items whose results a group contributes; may be empty."""
        start, stop = split_ranges(self.items // self.unit, self.groups, self.shares)[group]
        return start * self.unit, stop * self.unit

    def held(self, group: int) -> tuple[int, int]:
        """Return (start, stop) of the items that a group computes: its own, or the first ones if it has none."""
        start, stop = self.owned(group)
        return (start, stop) if stop > start else (0, self.unit)

    def take(self, arguments: Mapping[str, Any], group: int) -> dict[str, Any]:
        """Return a group's part of a call's arguments, as views."""
        if self.groups == 1:
            return dict(arguments)
        start, stop = self.held(group)
        return {k: map_tensors(v, lambda t: t[start:stop]) if k in self.stacked else v for k, v in arguments.items()}
