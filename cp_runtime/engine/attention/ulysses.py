"""Ulysses: exchange token shards for head shards and back. Attention in between is over whole chunks, for a share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and head counts, and one packed
collective for all tensors of the same tokens.

Shape suffixes: B batch, L tokens of this rank, C tokens of the chunk in gathered order, D head dimension. N heads come in *units*:
one key/value head and its query heads. Units are dealt out to the ranks like tokens (`sharding.split_sizes`); with too few, some
ranks get none: they take part in the collectives and skip the attention.

| step | shape on rank r |
|---|---|
| in: several tensors, each with `width` heads per unit | `[B, L_r, N, D]` |
| sent to rank p: all tensors side by side | `[L_r, B, units_p * sum of widths, D]` |
| received, from all ranks into one buffer | `[C, B, units_r * sum of widths, D]` |
| out: a view of it for each tensor | `[B, units_r * width, C, D]`; on CPUs of one computer copied, head by head |

For any number of ranks the host launches one collective and one copy per tensor, or two where ranks get different numbers of units:
a denoising step on a fast GPU is so short that each launch would show. So would Python's time: a copy is one call of torch from a
view to a view, and all sizes and offsets, which follow from shapes, are computed once (`form`).

On slow links the heads go in several *rounds*: a part of every rank's units at a time, so that one round travels while the previous
one attends. The result does not depend on the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import PlanError
from ..ranks.collectives import RankGroup
from ..ranks.sharding import Shares, split_ranges, split_sizes

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset, as `Tensor.as_strided` takes them."""


@lru_cache(maxsize=256)
def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return the least repetition of key/value heads that gives every rank one, as far as there are query heads."""
    per_key = heads // kv_heads
    return next((n for n in range(1, per_key + 1) if per_key % n == 0 and kv_heads * n >= ranks), per_key)


class Run(NamedTuple):
    """Neighbouring ranks with equally many units, of which a round has equally many from each."""

    first: int  # unit of the first of them
    ranks: int
    each: int  # units of each rank in all rounds
    start: int  # first of these in this round
    units: int  # number of these in this round


class Deal(NamedTuple):
    """Head units of every rank in a round."""

    runs: tuple[Run, ...]
    sizes: tuple[int, ...]  # units of every rank
    ranges: tuple[tuple[int, int], ...]  # (start, stop) of them


@lru_cache(maxsize=256)
def deal(units: int, ranks: int, shares: Shares, index: int, rounds: int) -> Deal:
    """Deal out head units to ranks, and return those of one round."""
    runs, ranges, first = list[Run](), list[tuple[int, int]](), 0
    # Neighbours with equally many units make one run: one view, and one copy, for all of them.
    for each, same in groupby(split_sizes(units, ranks, shares)):
        start, stop = split_ranges(each, rounds)[index]
        run = Run(first, len(list(same)), each, start, stop - start)
        begins = [first + each * place for place in range(run.ranks)]
        ranges += [(begin + start, begin + stop) for begin in begins]
        runs += [run] if run.units else []
        first += run.ranks * each
    return Deal(tuple(runs), tuple(stop - start for start, stop in ranges), tuple(ranges))


class Form(NamedTuple):
    """Layout of tensors of some shapes in the buffers of an exchange. It holds only numbers: all blocks of a model share it."""

    widths: tuple[int, ...]  # heads per unit of every tensor
    counts: tuple[int, ...]  # heads of every tensor on this rank
    elements: tuple[int, int]  # of this rank's tokens with all heads, and of all tokens with this rank's heads
    by_rank: tuple[int, ...]  # bytes of the former for every rank that has the heads
    by_token: tuple[int, ...]  # bytes of the latter for every rank that has the tokens
    blocks: tuple[tuple[Run, View], ...]  # of the former, see `_by_rank`
    tensors: tuple[View, ...]  # of the latter, `[B, own heads, C, D]` each


@lru_cache(maxsize=256)
def form(
    dealt: tuple[int, int, Shares, int, int],
    rank: int,
    heads: tuple[int, ...],
    lengths: tuple[int, ...],
    B: int,
    D: int,
    itemsize: int,
) -> Form:
    """Return the form of tensors with these heads. `dealt`: arguments of `deal`; `lengths`: tokens of every rank."""
    runs, sizes, _ = deal(*dealt)
    widths = tuple(count // dealt[0] for count in heads)
    if any(count % dealt[0] for count in heads):
        raise PlanError(f"tensors of {' and '.join(map(str, heads))} heads cannot be dealt out in {dealt[0]} units")
    L, C, width, own = lengths[rank], sum(lengths), sum(widths), sizes[rank]
    blocks, start = list[tuple[Run, View]](), 0
    for run in runs:
        shape = run.ranks, L, B, run.units * width, D
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(5))
        blocks.append((run, (shape, strides, start)))
        start += math.prod(shape)
    counts, strides, unit = tuple(own * each for each in widths), (own * width * D, D, B * own * width * D, 1), B * width * D
    return Form(
        widths,
        counts,
        elements=(start, C * unit * own),
        by_rank=tuple(L * unit * units * itemsize for units in sizes),
        by_token=tuple(length * unit * own * itemsize for length in lengths),
        blocks=tuple(blocks),
        tensors=tuple(
            ((B, count, C, D), strides, first * D) for count, first in zip(counts, accumulate(counts, initial=0), strict=False)
        ),
    )


class HeadExchange:
    """The exchange for one round of an attention: a part of `units` head units, dealt out to the ranks of a chunk by their shares.

    Args:
        group: the ranks of the chunk.
        units: number of units in all rounds.
        shares: see `split_sizes`.
        index, rounds: index of this round, and number of rounds.

    Attributes:
        own_range: (start, stop) of the units that this rank attends with.
    """

    def __init__(self, group: RankGroup, units: int, shares: Shares = (), index: int = 0, rounds: int = 1) -> None:
        self._group, self._dealt = group, (units, group.size, shares, index, rounds)
        self.own_range = deal(*self._dealt).ranges[group.rank]

    def to_heads(self, tensors: Sequence[Tensor], lengths: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        """Start an all-to-all of this rank's tokens with all heads for the chunk's tokens with this rank's heads.

        Args:
            tensors: `[B, L, N_i, D]`, the same tokens, of one dtype; N_i is a multiple of the number of units.
            lengths: tokens of every rank of the chunk.

        Returns:
            A function that waits, and returns each tensor as `[B, own heads, C, D]`.
        """
        first, heads = tensors[0], tuple([tensor.shape[2] for tensor in tensors])
        B, _, _, D = first.shape
        widths, counts, elements, by_rank, by_token, blocks, views = form(
            self._dealt, self._group.rank, heads, lengths, B, D, first.element_size()
        )
        shared = self._group.shared if first.is_cpu else None
        size = elements[0] * first.element_size()
        send = first.new_empty(elements[0]) if shared is None else shared.space(size, first.dtype)
        for run, block in blocks:
            # A GPU copies one tensor after the other: in four dimensions it would be one kernel, which divides for each element.
            torch.cat([*map(_by_rank, tensors, widths, repeat(run))], 3, out=send.as_strided(*block))
        if shared is not None:
            parts = self._group.all_to_all_in_place(shared, send, by_rank, by_token)

            def join() -> list[Tensor]:
                # The tokens of each head side by side: CPU kernels read those faster.
                whole = send.new_empty(B, sum(counts), sum(lengths), D)
                places = [place.permute(2, 0, 1, 3) for place in whole.split(lengths, 2) if place.numel()]
                for place, part in zip(places, parts.read(), strict=True):
                    place.copy_(part.view(place.shape))
                parts.release()
                return list(whole.split(counts, 1))

            return join
        whole = first.new_empty(elements[1])
        pending = self._group.all_to_all(send.view(torch.uint8), by_rank, whole.view(torch.uint8), by_token)

        def wait() -> list[Tensor]:
            pending.wait()
            return [whole.as_strided(*view) for view in views]

        return wait

    def to_tokens(self, out_BHCD: Tensor, lengths: tuple[int, ...], heads_per_unit: int) -> Callable[[Tensor], None]:
        """Start an all-to-all of attention outputs, `[B, own heads, C, D]`, back to the ranks of the tokens.

        Returns:
            A function that waits, and writes the heads of this round into a tensor `[B, L, all heads, D]`.
        """
        B, _, _, D = out_BHCD.shape
        heads = (heads_per_unit * self._dealt[0],)
        _, _, elements, by_rank, by_token, blocks, _ = form(
            self._dealt, self._group.rank, heads, lengths, B, D, out_BHCD.element_size()
        )
        out_CBHD = out_BHCD.permute(2, 0, 1, 3)
        if out_BHCD.is_cpu and (shared := self._group.shared) is not None:
            made = shared.space(elements[1] * out_BHCD.element_size(), out_BHCD.dtype)
            made.view(out_CBHD.shape).copy_(out_CBHD)
            parts = self._group.all_to_all_in_place(shared, made, by_token, by_rank)

            def put_parts(out_BLHD: Tensor) -> None:
                targets = [target for run, _ in blocks for target in _by_rank(out_BLHD, heads_per_unit, run).unbind()]
                # Without tokens of its own a rank has targets, which are empty, and no parts.
                for target, part in zip(targets, parts.read(), strict=bool(elements[0])):
                    target.copy_(part.view(target.shape))
                parts.release()

            return put_parts
        send, received = out_CBHD.reshape(-1), out_BHCD.new_empty(elements[0])
        pending = self._group.all_to_all(send.view(torch.uint8), by_token, received.view(torch.uint8), by_rank)

        def put(out_BLHD: Tensor) -> None:
            pending.wait()
            for run, block in blocks:
                _by_rank(out_BLHD, heads_per_unit, run).copy_(received.as_strided(*block))

        return put


class Program:
    """The exchanges of all attentions of one form in a call, where every rank has equally many tokens and heads, and devices send
    their own memory: buffers, views and sizes are made once. What is left for the host is four copies and two collectives.

    A block may reuse the buffers of the last one: copies into them are launched behind the messages that the last one waited for.

    Args:
        exchange: of all heads.
        q, k: `[B, L, H, D]`, `[B, L, K, D]`, as every attention has them, keys like values.
    """

    def __init__(self, exchange: HeadExchange, q: Tensor, k: Tensor) -> None:
        group, dealt = exchange._group, exchange._dealt
        B, L, H, D = q.shape
        lengths, ranks, itemsize = (L,) * group.size, group.size, q.element_size()
        there = form(dealt, group.rank, (H, k.shape[2], k.shape[2]), lengths, B, D, itemsize)
        back = form(dealt, group.rank, (H,), lengths, B, D, itemsize)
        ((self._run, block),) = there.blocks
        send, whole, out = (q.new_empty(count) for count in (*there.elements, back.elements[1]))
        self._widths, self._size, self._shape = there.widths, back.elements[0], (B, L, H, D)
        self._packed, self._qkv = send.as_strided(*block), [whole.as_strided(*view) for view in there.tensors]
        self._out = out.view(L * ranks, B, H // ranks, D).permute(1, 2, 0, 3)
        self._there = partial(group.exchange_equally, whole.view(torch.uint8), send.view(torch.uint8), list(there.by_rank))
        self._sent, self._back = out.view(torch.uint8), partial(group.exchange_equally, sizes=list(back.by_rank))
        own = H // ranks * D
        self._by_token = (B, L, ranks, H // ranks, D), (own, B * own, L * B * own, D, 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attend to all tokens. Returns `[B, L, H, D]`."""
        torch.cat([*map(_by_rank, (q, k, v), self._widths, repeat(self._run))], 3, out=self._packed)
        self._there()
        self._out.copy_(attend(*self._qkv, None))
        received = self._out.new_empty(self._size)
        self._back(received.view(torch.uint8), self._sent)
        return received.as_strided(*self._by_token).reshape(self._shape)


def _by_rank(tensor: Tensor, width: int, run: Run) -> Tensor:
    """Return a view `[ranks, L, B, heads of each in this round, D]` of `[B, L, N, D]`."""
    first, ranks, each, start, units = run
    item, token, head, element = tensor.stride()
    B, L, _, D = tensor.shape
    place = tensor.storage_offset() + (first + start) * width * head
    return tensor.as_strided((ranks, L, B, units * width, D), (each * width * head, token, item, head, element), place)
