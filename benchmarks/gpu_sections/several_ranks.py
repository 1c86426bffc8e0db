"""Rank script: rates of the machine, and attention in every mode against what the planner chooses. Rank 0 reports.

Argument: lengths of the sequence, with commas between them. Every rank has a device of its own, and NCCL.
"""

import time

from support.ranks import finish, report, start

rank, world, (lengths,) = start()

import torch
import torch.distributed as dist

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.config import ContextParallelConfig, SequenceSettings
from cp_runtime.engine.cost import AttentionShape, choose
from cp_runtime.engine.measuring import measure
from cp_runtime.engine.mesh import SequenceMesh, factors
from cp_runtime.engine.sharding import JointLayout

HEADS, HEAD_DIM, REPETITIONS = 24, 128, 5
device, dtype = torch.device("cuda", rank), torch.bfloat16
torch.cuda.set_device(device)
mesh = SequenceMesh(dist.new_group(backend="nccl"))


def seconds(config, layout, local):
    """The best of some calls, on the slowest rank."""
    times = []
    for _ in range(REPETITIONS + 1):
        dist.barrier()
        began = time.perf_counter()
        context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout)
        torch.cuda.synchronize()
        took = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    return min(times[1:])


with torch.inference_mode():
    rates = measure(mesh, device).of(tuple(range(world)))
    report(latency_us=1e6 * rates.latency, GB_per_second=rates.bandwidth / 1e9, TFLOPS=rates.flops / 1e12)
    for total in map(int, lengths.split(",")):
        layout = JointLayout((total,), world)
        local = [torch.randn(1, layout.local_lengths[rank], HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(3)]
        shape = AttentionShape(1, total, total, HEADS, HEADS, HEAD_DIM, dtype.itemsize)
        chosen = choose(shape, world, SequenceSettings(), rates)
        measured = {}
        for ring, ulysses in factors(world):
            config = ContextParallelConfig(
                ring_degree=ring, ulysses_degree=ulysses, rotate_method="alltoall", ulysses_anything=True, ring_anything=True
            )
            measured[f"ring {ring} x Ulysses {ulysses}"] = 1e3 * seconds(config, layout, local)
        report(tokens=total, chosen=f"ring {chosen[0]} x Ulysses {chosen[1]}", ms=measured)
finish()
