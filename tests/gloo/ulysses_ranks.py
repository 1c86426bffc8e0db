"""Rank script: Ulysses attention against one process, over the whole matrix; rank 0 reports."""

import itertools

import torch
import torch.distributed as dist
from support.ranks import finish, report, start

rank, world, _ = start()

from cp_runtime.attention.ulysses import ulysses_attention  # noqa: E402
from cp_runtime.comfy.attention import gathered_mask  # noqa: E402
from cp_runtime.mesh import SequenceGroup  # noqa: E402
from cp_runtime.plan import CallState  # noqa: E402

HEAD_DIM = 8
group = SequenceGroup(dist.group.WORLD)


def sdpa(q, k, v, mask):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def make_mask(kind, batch, heads, total, generator):
    if kind is None:
        return None
    if kind == "ones":
        return torch.ones(batch, 1, 1, total, dtype=torch.bool)
    if kind == "keys":
        mask = torch.rand(batch, 1, 1, total, generator=generator) > 0.4
        mask[..., 0] = True
        return mask
    additive = torch.randn(batch, heads if kind == "heads" else 1, total, total, generator=generator)
    return additive if kind in ("additive", "heads") else additive > -0.5


for lengths, (heads, kv_heads), batch, kind, dtype in itertools.product(
    [(5, 13), (8, 16), (1, 7), (17,), (1, 3)],
    [(4, 4), (3, 3), (1, 1), (6, 2), (5, 5), (2, 1)],
    [1, 2],
    [None, "ones", "keys", "full", "additive", "heads"],
    [torch.float32, torch.bfloat16],
):
    if dtype is torch.bfloat16 and kind not in (None, "full"):
        continue
    generator = torch.Generator().manual_seed(7)
    total = sum(lengths)
    q = torch.randn(batch, total, heads, HEAD_DIM, generator=generator)
    k = torch.randn(batch, total, kv_heads, HEAD_DIM, generator=generator)
    v = torch.randn(batch, total, kv_heads, HEAD_DIM, generator=generator)
    mask = make_mask(kind, batch, heads, total, generator)
    exact = sdpa(*(t.transpose(1, 2) for t in (q, k, v)), mask).transpose(1, 2)
    state = CallState(rank, world)
    streams = tuple("abc"[: len(lengths)])
    state.lengths.update(zip(streams, lengths, strict=True))
    layout = state.layout(streams)
    before = group.stats.collectives
    local = ulysses_attention(
        *(layout.take_local(t.to(dtype), rank, 1) for t in (q, k, v)),
        layout=layout,
        group=group,
        attend=lambda q, k, v, mask: sdpa(q, k, v, mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask),
        mask=None if mask is None else gathered_mask(state, streams, layout, mask),
    )
    collectives = group.stats.collectives - before
    # gathered order -> joint order
    owned = layout.owned_positions(rank)
    gathered = group.all_gather(local if owned is None else local[:, owned], layout.owned_lengths, 1)
    joint = torch.empty_like(gathered)
    joint[:, layout.gathered_order] = gathered
    one_process = sdpa(
        *(t.to(dtype).transpose(1, 2) for t in (q, k, v)),
        None if mask is None else mask.to(dtype) if mask.is_floating_point() else mask,
    )
    report(
        case=f"{lengths}-{heads}/{kv_heads}-B{batch}-{kind}-{str(dtype)[6:]}",
        dtype=str(dtype)[6:],
        difference=(joint.float() - exact).abs().max().item(),
        one_process=(one_process.transpose(1, 2).float() - exact).abs().max().item(),
        collectives=collectives,
    )
finish()
