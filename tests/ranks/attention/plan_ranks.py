"""Rank script: attentions of several shapes in turns through the same ranks, which keep plans; rank 0 reports the worst rank."""

import gc
import weakref

import torch
import torch.distributed as dist
from support.ranks import finish, report, start

from cp_runtime.engine.attention import context_parallel as attention
from cp_runtime.engine.attention import kernels
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout

rank, world, _ = start()

# lengths, query and key heads, head dimension, batch, dtype, shares, rounds
BASE = ((16, 48), (8, 8), 8, 1, torch.float32, (), 1)
CHANGES = [{}, {0: (16, 47)}, {0: (48, 16)}, {1: (8, 2)}, {1: (7, 7)}, {2: 16}, {3: 2}, {4: torch.float64}, {5: (2, 1)}, {6: 3}]
CASES = [tuple(change.get(place, value) for place, value in enumerate(BASE)) for change in CHANGES]
meshes = {shares: SequenceMesh(dist.group.WORLD, shares=shares) for shares in ((), (2, 1))}
made: list[weakref.ref] = []


def attend(lengths, heads, head_dim, batch, dtype, shares, rounds):
    """The largest error, and the result. Layouts and configs are made anew, and those before are gone."""
    generator, total = torch.Generator().manual_seed(sum(lengths) + head_dim), sum(lengths)
    q, k, v = (torch.randn(batch, total, n, head_dim, generator=generator, dtype=dtype) for n in (heads[0], heads[1], heads[1]))
    layout = JointLayout(lengths, world, (), shares)
    config = ContextParallelConfig(ulysses_degree=world, ulysses_anything=True, ulysses_rounds=rounds)
    local = [layout.take_local(tensor, rank, 1) for tensor in (q, k, v)]
    out = attention.context_parallel_attention(*local, mesh=meshes[shares], config=config, q_layout=layout)
    made.extend(weakref.ref(tensor) for tensor in (*local, out))
    whole = attention.sdpa()(*(tensor.transpose(1, 2) for tensor in (q, k, v)), None).transpose(1, 2)
    return (out - layout.take_local(whole, rank, 1)).abs().max().item(), out.clone()


gc.disable()
with torch.no_grad():
    first = [attend(*case) for case in CASES]
    again = [attend(*case) for case in (*reversed(CASES),)][::-1]
    same = all(torch.equal(one, other) for (_, one), (_, other) in zip(first, again, strict=True))
    numbers = torch.tensor([max(error for error, _ in (*first, *again)), float(not same)])
    del first, again
    alive = sum(ref() is not None for ref in made)
    kept = max(len(mesh.plans) for mesh in meshes.values())
    attention.PLANS = 2  # they are made again when there are too many
    numbers = torch.maximum(numbers, torch.tensor([max(attend(*case)[0] for case in CASES), 0.0]))
dist.all_reduce(numbers, dist.ReduceOp.MAX)
# A kernel that one rank alone can run, and one that all can.
ran = []


def run(q, k, v, mask, scale):
    ran.append(rank)
    return next(each for each in STOCK if each.name == "math").run(q, k, v, mask, scale)


STOCK = kernels.KERNELS
picky = kernels.Kernel("picky", run, lambda *inputs: rank == 0, on_request=True)
willing = kernels.Kernel("willing", run, lambda *inputs: True, on_request=True)
kernels.KERNELS = (picky, willing, *STOCK)
layout, config = JointLayout((24,), world), ContextParallelConfig(ring_degree=world, rotate_method="alltoall", ring_anything=True)
tokens = layout.take_local(torch.randn(1, 24, 2, 8, generator=torch.Generator().manual_seed(0)), rank, 1)
mesh, used = meshes[()], []
with torch.no_grad():
    for name in ("picky", "picky", "willing", "willing"):
        before = len(ran)
        attention.context_parallel_attention(tokens, tokens, tokens, mesh=mesh, config=config, q_layout=layout, kernel=name)
        used.append(float(len(ran) > before))
used = torch.tensor(used)
dist.all_reduce(used)
report(worst=numbers[0].item(), differs=bool(numbers[1]), alive=alive, kept=kept, later=max(len(m.plans) for m in meshes.values()),
       ran=used.tolist(), world=world)  # fmt: skip
finish()
