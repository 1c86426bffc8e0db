"""Ring attention: queries stay, chunks of keys and values go around. Source: Liu et al., "Ring Attention", arXiv 2310.01889.

They move from neighbour to neighbour in R - 1 exchanges, each in flight while the previous chunk is computed on. Two packed chunk
buffers are held beside the local keys and values: 2 / R of the whole. Where ranks share memory, each packs its chunk once, and the
others read it there. It is exact for uneven chunks and any mask.

Partial attentions are merged by output and log-sum-exp. With out_i = softmax-weighted values over part i and lse_i = log of the sum
of exponentiated scores there, attention over both parts is the average of the outputs with weights exp(lse_i - lse), lse =
log(exp(lse_1) + exp(lse_2)). Source: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1.

Shape suffixes: B batch, H query heads, K key/value heads, L queries of this rank, C keys of a chunk, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from ..ranks.collectives import RankGroup
from .eight_bits import decode, encode

ChunkAttention = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


class PartialAttention:
    """Accumulated output over parts of the keys: `out`, `[B, H, L, D]`, None before the first part.

    It is in float32 with `convert_to_fp32`. The log-sum-exp always is.
    """

    def __init__(self, convert_to_fp32: bool = True) -> None:
        self._convert = convert_to_fp32
        self.out: Tensor | None = None

    def add(self, out_BHLD: Tensor, lse_BHL: Tensor) -> None:
        """Merge one part: `[B, H, L, D]` and `[B, H, L]`. Rows without visible keys must have log-sum-exp -inf and output 0."""
        if self._convert:
            out_BHLD = out_BHLD.to(torch.promote_types(out_BHLD.dtype, torch.float32))
        if self.out is None:
            self.out, self._lse = out_BHLD, lse_BHL
            return
        lse = torch.logaddexp(self._lse, lse_BHL)
        # -inf - -inf is nan: no key has been visible so far, so the output stays 0.
        weight = torch.exp(lse_BHL - lse).nan_to_num_(0.0)
        self.out.lerp_(out_BHLD, weight.unsqueeze(-1).to(out_BHLD.dtype))
        self._lse = lse


def rotate(
    q_BHLD: Tensor,
    k_BKCD: Tensor,
    v_BKCD: Tensor,
    *,
    group: RankGroup,
    lengths: Sequence[int],
    attend: ChunkAttention,
    convert_to_fp32: bool,
    coded: bool = False,
) -> Tensor:
    """Attend to every chunk in turn while the next one arrives.

    Args:
        q_BHLD, k_BKCD, v_BKCD: this rank's chunk.
        group: the ring.
        lengths: keys of every chunk.
        attend: `(q, k, v, chunk index) -> (out_BHLD, lse_BHL)`.
        convert_to_fp32: merge in float32.
        coded: keys and values travel in 8 bits; those of this rank stay exact.

    Returns:
        `[B, H, L, D]` in q's dtype.
    """
    own = [encode(tensor) if coded else tensor for tensor in (k_BKCD, v_BKCD)]
    B, K, _, D = own[0].shape
    merged = PartialAttention(convert_to_fp32)
    # Closed also where an attention fails: its senders get back the memory of what it has not read.
    with contextlib.closing(_rotated_chunks(group, own, [2 * B * K * D * length for length in lengths])) as chunks:
        for step, packed in enumerate(chunks):
            chunk = (group.rank - step) % group.size
            if step or not coded:  # packed, the tokens of each head lie side by side, which CPU kernels read faster
                arrived = packed.view(2, B, K, lengths[chunk], D)
                k_BKCD, v_BKCD = decode(arrived, q_BHLD.dtype) if coded else arrived
            if q_BHLD.shape[2] and lengths[chunk]:
                merged.add(*attend(q_BHLD, k_BKCD, v_BKCD, chunk))
    return q_BHLD if merged.out is None else merged.out.to(q_BHLD.dtype)


def _rotated_chunks(group: RankGroup, own: Sequence[Tensor], elements: Sequence[int]) -> Generator[Tensor]:
    """Return the packed chunks of all ranks, flat: this rank's, then that of the previous one, and so on. Each is there until the
    next one is asked for. `elements`: of every chunk."""
    R, rank, first = group.size, group.rank, own[0]
    if first.is_cpu and (shared := group.shared) is not None:
        made = shared.space(elements[rank] * first.element_size(), first.dtype)
        torch.stack(list(own), out=made.view(2, *first.shape))
        yield from group.pass_around(shared, made, [count * first.element_size() for count in elements])
        return
    buffers = [first.new_empty(max(elements)) for _ in range(2)]

    def packed(step: int) -> Tensor:
        return buffers[step % 2][: elements[(rank - step) % R]]

    torch.stack(list(own), out=packed(0).view(2, *first.shape))
    # Two buffers will do: the chunk of a step is computed on and sent on while the next one arrives in the other buffer, and
    # both are over before the buffers change places.
    for step in range(R):
        coming = group.exchange(packed(step), packed(step + 1)) if step + 1 < R else None
        yield packed(step)
        if coming is not None:
            coming.wait()
