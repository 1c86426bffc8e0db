"""Rank script: Ulysses between fake CUDA devices (`support/stand_in`) by a program that all blocks of a call share, against that
in rounds."""

import torch
from support.ranks import finish, of_all, report, start
from support.stand_in import tensors
from torch import distributed as dist

from cp_runtime.engine.attention import context_parallel
from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout
from cp_runtime.engine.state import CallState

BLOCKS = 3
rank, world, _ = start(cards=True)
torch.set_grad_enabled(False)
mesh, hosts = SequenceMesh(dist.group.WORLD), dist.new_group(backend="gloo")
made = []


class Counted(context_parallel.Program):
    def __init__(self, *given):
        made.append(self)
        super().__init__(*given)


context_parallel.Program = Counted


def call(rounds, lengths, heads, kv_heads, batch, dtype):
    """The results of some blocks, each with numbers of its own; nothing waits between them."""
    config = ContextParallelConfig(ulysses_degree=world, ulysses_anything=True, ulysses_rounds=rounds)
    layout, state, outs = JointLayout(lengths, world), CallState(rank, world), []
    for block in range(BLOCKS):
        random = torch.Generator().manual_seed(block)
        whole = [torch.randn(batch, sum(lengths), count, 16, generator=random) for count in (heads, kv_heads, kv_heads)]
        local = [layout.take_local(each, rank, 1).to("cuda", dtype) for each in whole]
        outs.append(context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout, once=state.once))
    state.close()
    return [out.cpu() for out in outs]


for name, straight, lengths, heads, kv_heads, batch, dtype in (
    ("alike", True, (8, 24), 8, 8, 2, torch.float32),
    ("fewer keys", True, (32,), 16, 8, 1, torch.float32),
    ("bfloat16", True, (16,), 8, 8, 3, torch.bfloat16),
    ("uneven tokens", False, (9, 24), 8, 8, 2, torch.float32),
    ("uneven heads", False, (32,), 7, 7, 1, torch.float32),
    ("too few keys", False, (32,), 8, 1, 1, torch.float32),
):
    made.clear()
    tensors.waits.clear()
    found = call(1, lengths, heads, kv_heads, batch, dtype)
    waits = [place for place in tensors.waits if "cp_runtime/" in place]
    programs, expected = len(made), call(2, lengths, heads, kv_heads, batch, dtype)
    same = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    report(case=name, right=of_all([same, programs == straight, not waits], hosts), programs=programs)
finish()
