"""Ring attention: queries stay, chunks of keys and values go around. Source: Liu et al., "Ring Attention", arXiv 2310.01889.

Two ways to move them, both exact for uneven chunks and any mask:

- `alltoall`: from neighbour to neighbour in R - 1 exchanges, each in flight while the previous chunk is computed on. Two packed
  chunk buffers are held beside the local keys and values: 2 / R of the whole.
- `allgather`: all at once, then one attention without merging. Holds the whole. It is just `RankGroup.all_gather`.

Shape suffixes: B batch, H query heads, K key/value heads, L own queries, C keys of a chunk, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..collectives import RankGroup
from .merge import PartialAttention

ChunkAttention = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def rotate(
    q_BHLD: Tensor,
    k_BKCD: Tensor,
    v_BKCD: Tensor,
    *,
    group: RankGroup,
    lengths: Sequence[int],
    attend: ChunkAttention,
    convert_to_fp32: bool,
) -> Tensor:
    """Attend to every chunk in turn while the next one arrives.

    Args:
        q_BHLD, k_BKCD, v_BKCD: this rank's chunk.
        group: the ring.
        lengths: keys of every chunk.
        attend: `(q, k, v, chunk index) -> (out_BHLD, lse_BHL)`.
        convert_to_fp32: merge in float32.

    Returns:
        `[B, H, L, D]` in q's dtype.
    """
    B, K, _, D = k_BKCD.shape
    R, rank = group.size, group.rank
    merged = PartialAttention(convert_to_fp32)
    buffers = [k_BKCD.new_empty(2 * B * K * D * max(lengths)) for _ in range(2)]

    def packed(step: int) -> Tensor:
        return buffers[step % 2][: 2 * B * K * D * lengths[(rank - step) % R]]

    torch.stack([k_BKCD, v_BKCD], out=packed(0).view(2, *k_BKCD.shape))
    for step in range(R):
        coming = group.exchange(packed(step), packed(step + 1)) if step + 1 < R else None
        chunk = (rank - step) % R
        if step:
            k_BKCD, v_BKCD = packed(step).view(2, B, K, lengths[chunk], D)
        if q_BHLD.shape[2] and lengths[chunk]:
            merged.add(*attend(q_BHLD, k_BKCD, v_BKCD, chunk))
        if coming is not None:
            coming.wait()
    out_BHLD = merged.result()
    return q_BHLD if out_BHLD is None else out_BHLD.to(q_BHLD.dtype)
