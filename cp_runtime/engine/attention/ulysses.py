"""Ulysses: exchange token shards for head shards and back. Attention in between is over whole chunks, for a share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and head counts, and one packed
collective for all tensors of the same tokens.

Shape suffixes: B batch, L tokens of this rank, C tokens of the chunk in gathered order, D head dimension. N heads come in *units*:
one key/value head and its query heads. Units are dealt out to the ranks like tokens (`sharding.split_sizes`); with too few,
some ranks get none: they take part in the collectives and skip the attention.

| step | shape on rank r |
|---|---|
| in: several tensors, each with `width` heads per unit | `[B, L_r, N, D]` |
| sent to rank p: all tensors side by side | `[L_r, B, units_p * sum of widths, D]` |
| received, from all ranks into one buffer | `[C, B, units_r * sum of widths, D]` |
| out: a view of it for each tensor | `[B, units_r * width, C, D]` |

For any number of ranks the host launches one collective and one `cat`, or two where ranks get different numbers of units:
a denoise step on a fast GPU is so short that the time of each launch would show.

On slow links the heads go in several *rounds*: a part of every rank's units at a time, so that one round travels while the one
before attends. The same numbers are computed, whatever the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import RankGroup
from ..sharding import Shares, split_ranges, split_sizes


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return the least repetition of key/value heads that gives every rank one, as far as there are query heads."""
    per_key = heads // kv_heads
    return next((n for n in range(1, per_key + 1) if per_key % n == 0 and kv_heads * n >= ranks), per_key)


class Run(NamedTuple):
    """Neighbouring ranks with equally many units, of which a round has equally many from each."""

    first: int  # unit of the first of them
    ranks: int
    each: int  # units that one of them has in all rounds
    start: int  # of these, the first in this round
    units: int  # and how many


class Deal(NamedTuple):
    """What every rank gets of the head units of a round."""

    runs: tuple[Run, ...]
    sizes: tuple[int, ...]  # units of every rank
    ranges: tuple[tuple[int, int], ...]  # (start, stop) of them


@lru_cache(maxsize=256)  # all blocks of a model deal alike, and the host's time shows on a fast device
def deal(units: int, ranks: int, shares: Shares, index: int, rounds: int) -> Deal:
    """Deal out head units to ranks, and return those of one round."""
    runs, ranges, first = list[Run](), list[tuple[int, int]](), 0
    for each, same in groupby(split_sizes(units, ranks, shares)):
        start, stop = split_ranges(each, rounds)[index]
        run = Run(first, len(list(same)), each, start, stop - start)
        begins = [first + each * place for place in range(run.ranks)]
        ranges += [(begin + start, begin + stop) for begin in begins]
        runs += [run] if run.units else []
        first += run.ranks * each
    return Deal(tuple(runs), tuple(stop - start for start, stop in ranges), tuple(ranges))


class Way(NamedTuple):
    """How tensors of some shapes travel: computed once, as all blocks of a model send alike."""

    widths: tuple[int, ...]  # heads per unit, of every tensor
    blocks: tuple[
        tuple[Run, int, tuple[int, ...]], ...
    ]  # of the buffer with all heads: what it has for a run, from where on, shape
    elements: int  # of that buffer
    all_heads: tuple[int, ...]  # elements of it, of every rank
    own_heads: tuple[int, ...]  # elements of all ranks' tokens with this rank's heads, of every rank


class HeadExchange:
    """The exchange for one round of an attention: a part of `units` head units, dealt out to the ranks of a chunk by their shares.

    Args:
        group: the ranks of the chunk.
        units: of all rounds.
        shares: see `split_sizes`.
        index, rounds: which one this is, and how many there are.

    Attributes:
        own_range: (start, stop) of the units that this rank attends with.
    """

    def __init__(self, group: RankGroup, units: int, shares: Shares = (), index: int = 0, rounds: int = 1) -> None:
        self._group, self._units = group, units
        self._runs, self._sizes, ranges = deal(units, group.size, shares, index, rounds)
        self._own, self.own_range = self._sizes[group.rank], ranges[group.rank]
        self._ways: dict[object, Way] = {}

    def to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start exchanging this rank's tokens with all heads for the chunk's tokens with this rank's heads. One collective.

        Args:
            tensors: `[B, L, N_i, D]`, the same tokens, of one dtype; N_i is a multiple of the number of units.
            lengths: tokens of every rank of the chunk.

        Returns:
            A function that waits, and returns each tensor as `[B, own heads, C, D]`.
        """
        B, L, _, D = tensors[0].shape
        way = self._way(B, L, D, tuple(tensor.shape[2] // self._units for tensor in tensors), lengths)
        send = tensors[0].new_empty(way.elements)
        for run, start, shape in way.blocks:
            parts = [_by_rank(tensor, run, width) for tensor, width in zip(tensors, way.widths, strict=True)]
            torch.cat(parts, 3, out=_block(send, start, shape))
        heads = [self._own * width for width in way.widths]
        whole = send.new_empty((sum(lengths), B, sum(heads), D))
        pending = self._group.all_to_all(send, way.all_heads, whole, way.own_heads)

        def wait() -> list[Tensor]:
            pending.wait()
            return list(whole.permute(1, 2, 0, 3).split_with_sizes(heads, 1))

        return wait

    def to_tokens(self, out_BHCD: Tensor, lengths: Sequence[int], heads_per_unit: int) -> Callable[[Tensor], None]:
        """Start sending attention outputs, `[B, own heads, C, D]`, back to the ranks that have the tokens. One collective.

        Returns:
            A function that waits, and puts the heads of this round into their places of a tensor `[B, L, all heads, D]`.
        """
        B, _, _, D = out_BHCD.shape
        way = self._way(B, lengths[self._group.rank], D, (heads_per_unit,), lengths)
        send = out_BHCD.permute(2, 0, 1, 3).contiguous()
        received = send.new_empty(way.elements)
        pending = self._group.all_to_all(send, way.own_heads, received, way.all_heads)

        def put(out_BLHD: Tensor) -> None:
            pending.wait()
            for run, start, shape in way.blocks:
                _by_rank(out_BLHD, run, heads_per_unit).copy_(_block(received, start, shape))

        return put

    def _way(self, B: int, L: int, D: int, widths: tuple[int, ...], lengths: Sequence[int]) -> Way:
        key = B, L, D, widths, tuple(lengths)
        way = self._ways.get(key)
        if way is None:
            unit, blocks, start = B * D * sum(widths), list[tuple[Run, int, tuple[int, ...]]](), 0  # elements per token and unit
            for run in self._runs:
                shape = run.ranks, L, B, run.units * sum(widths), D
                blocks.append((run, start, shape))
                start += math.prod(shape)
            all_heads, own_heads = (
                tuple(L * unit * n for n in self._sizes),
                tuple(length * unit * self._own for length in lengths),
            )
            way = self._ways[key] = Way(widths, tuple(blocks), start, all_heads, own_heads)
        return way


def _block(buffer: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Return what a flat buffer holds for or from a run of ranks, `[B, L, ranks, width of its units in this round, D]`."""
    size = math.prod(shape)
    return (buffer if size == buffer.numel() else buffer[start : start + size]).view(shape).permute(2, 1, 0, 3, 4)


def _by_rank(tensor: Tensor, run: Run, width: int) -> Tensor:
    """Return a view `[B, L, ranks, heads of each in this round, D]` of `[B, L, N, D]`."""
    B, L, heads, D = tensor.shape
    if run.ranks * run.each * width < heads:
        tensor = tensor.narrow(2, run.first * width, run.ranks * run.each * width)
    by_rank = tensor.view(B, L, run.ranks, run.each * width, D)
    return by_rank if run.units == run.each else by_rank.narrow(3, run.start * width, run.units * width)
