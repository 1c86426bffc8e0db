"""Rank script: every case of attention_cases.py against one process; rank 0 reports the worst rank.

Arguments: head dimension, 8 by default; 5 for every fifth case.
"""

import dataclasses
import functools
import itertools

import torch
import torch.distributed as dist
from attention_cases import MODES, SHARES, cases
from support.ranks import finish, own_device, report, start

from cp_runtime.engine.attention import context_parallel as attention
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout

rank, world, arguments = start()
device = own_device()


HEAD_DIM = int(arguments[0]) if arguments else 8
SELDOM = 11
EVERY = int(arguments[1]) if len(arguments) > 1 else 1
PACKED_LIMIT = attention.PACKED_LIMIT
equal = SequenceMesh(dist.group.WORLD)
unequal = {shares: SequenceMesh(dist.group.WORLD, shares=shares) for shares in SHARES[world]}


def one_process(q, k, v, mask):
    """Attention of all tokens here, `[B, S, H, D]`; rows that see no key give 0, as torch's own kernels do."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def make_mask(kind, batch, heads, layout, generator):
    """(mask for one process, mask for this rank)."""
    total = layout.total
    if kind is None:
        return None, None
    if kind == "ones":
        mask = torch.ones(batch, 1, 1, total, dtype=torch.bool)
    elif kind in ("keys", "local keys"):
        mask = torch.rand(batch, 1, 1, total, generator=generator) > 0.4
        mask[..., 0] = True
        if kind == "local keys":
            return mask, layout.take_local(mask, rank, -1)
    elif kind == "one rank hidden":  # a whole chunk of the ring is invisible
        mask = torch.ones(batch, 1, total, total, dtype=torch.bool)
        hidden = [i for segments in layout.held[world - 1] for start, stop in segments for i in range(start, stop)]
        if len(hidden) < total:
            mask[..., hidden] = False
    elif kind == "row hidden":  # some tokens see nothing at all
        mask = torch.rand(batch, 1, total, total, generator=generator) > 0.3
        mask[:, :, ::3] = False
    elif kind == "lowest":  # the lowest number in place of -inf
        mask = torch.randn(batch, 1, total, total, generator=generator)
        mask[..., 1::4] = torch.finfo(torch.float32).min
    elif kind == "heads without batch":
        mask = torch.randn(heads, total, total, generator=generator)
    elif kind == "full":
        mask = torch.rand(batch, 1, total, total, generator=generator) > 0.3
    else:
        mask = torch.randn(batch, heads if kind == "heads" else 1, total, total, generator=generator)
        if kind == "additive":
            mask[..., 1::4] = -torch.inf
    return mask, mask


@functools.cache
def whole(lengths, heads, batch, kind, shares):
    """Inputs of a case, the masks, and what one process makes of it in float32: the same in every mode."""
    generator = torch.Generator().manual_seed(7)
    heads, kv_heads = heads
    inputs = [torch.randn(batch, sum(lengths), n, HEAD_DIM, generator=generator).to(device) for n in (heads, kv_heads, kv_heads)]
    mask, own_mask = make_mask(kind, batch, heads, JointLayout(lengths, world, (), shares), generator)
    mask, own_mask = (None if m is None else m.to(device) for m in (mask, own_mask))
    exact = one_process(*inputs, mask)
    # Only rank 0 reports.
    matters = (one_process(*inputs, None) - exact).abs().max().item() if rank == 0 and mask is not None else None
    return inputs, mask, own_mask, exact, matters


@functools.cache
def counted(lengths, heads, batch, kind, shares, dtype):
    """Which rows of which head count, `[B, S, H, 1]`: cuDNN leaves anything in those that a boolean mask hides from all keys."""
    _, mask, _, exact, _ = whole(lengths, heads, batch, kind, shares)
    rows = exact.new_ones(*exact.shape[:3], 1)
    if mask is None or dtype == torch.float32 or device.type == "cpu" or mask.dtype != torch.bool:
        return rows
    return rows * mask.any(-1, keepdim=True).transpose(1, 2)


@functools.cache
def rounding(lengths, heads, batch, kind, shares, dtype):
    """Error of one process in another dtype, root mean square."""
    inputs, mask, _, exact, _ = whole(lengths, heads, batch, kind, shares)
    here = one_process(*(t.to(dtype) for t in inputs), mask)
    error = (here.float() - exact) * counted(lengths, heads, batch, kind, shares, dtype)
    return (error.double() ** 2).mean().sqrt().item()


found, worst, squares = [], [], []
for number, case in enumerate(itertools.islice(cases(world), None, None, EVERY)):
    ring, ulysses, rotate_method, packed = MODES[case.mode]
    config = SequenceSettings(rotate_method=rotate_method).with_degrees(ring or world, ulysses or world)
    attention.PACKED_LIMIT = PACKED_LIMIT if packed else 0
    dtype, layout = getattr(torch, case.dtype), JointLayout(case.lengths, world, (), case.shares)
    mesh = unequal[case.shares] if case.shares else equal
    key = (case.lengths, case.heads, case.batch, case.mask, case.shares)
    inputs, _, own_mask, exact, matters = whole(*key)
    mesh.stats.reset()
    # Some models hand over tensors whose last dimension is not the innermost one.
    local = [layout.take_local(t.to(dtype), rank, 1) for t in inputs]
    if case.batch == 2:
        local = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in local]
    out = attention.context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout, mask=own_mask)
    counts = dict(mesh.stats.counts)
    outs = [out]
    if ring == 1 and number % SELDOM == 0:  # in more rounds, some of them without heads of a rank
        more = dataclasses.replace(config, ulysses_rounds=2 + number % 2)
        outs.append(attention.context_parallel_attention(*local, mesh=mesh, config=more, q_layout=layout, mask=own_mask))
    coded = 0.0
    if dtype == torch.float32 and number % SELDOM == 1:
        eight = dataclasses.replace(config, exchange="8 bit")
        rounded = attention.context_parallel_attention(*local, mesh=mesh, config=eight, q_layout=layout, mask=own_mask)
        coded = (rounded - out).square().sum().item() / (exact.square().sum().item() or 1.0)  # a mask may hide everything
    owned = layout.owned_positions(rank, device)
    expected = layout.take_local(exact, rank, 1)
    expected = expected if owned is None else expected[:, owned]
    rows = layout.take_local(counted(*key, dtype), rank, 1)
    rows = rows if owned is None else rows[:, owned]
    errors = [((each if owned is None else each[:, owned]).float() - expected) * rows for each in outs]
    finite = all(each.isfinite().all() for each in outs)
    worst.append([max(error.abs().max().item() for error in errors) if expected.numel() else 0.0, float(not finite)])
    squares.append([*((error.double() ** 2).sum().item() / exact.numel() for error in (errors[0], errors[-1])), coded])
    if rank == 0:
        names = {"case": case.name, "mode": case.mode, "mask": case.mask, "dtype": case.dtype}
        found.append({**names, "one_process_rms": rounding(*key, dtype), "mask_matters": matters, "counts": counts})
place = torch.device("cpu") if equal.whole.via_host else device
worst, squares = (torch.tensor(each, dtype=torch.float64, device=place) for each in (worst, squares))
dist.all_reduce(worst, dist.ReduceOp.MAX)
dist.all_reduce(squares)
for i, values in enumerate(found):
    report(
        **values,
        difference=worst[i, 0].item(),
        finite=worst[i, 1].item() == 0,
        rms=squares[i, :2].max().sqrt().item(),
        coded=squares[i, 2].sqrt().item(),
    )
finish()
