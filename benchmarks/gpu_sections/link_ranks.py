"""Rank script: rates of the machine, what a process group holds, attention in every mode against what the planner chooses.

Argument: lengths of the sequence, with commas between them. Rank 0 reports.
"""

import time

from support.ranks import finish, own_device, report, start

rank, world, (lengths,) = start()

import torch
import torch.distributed as dist

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.cost import AttentionShape, choose
from cp_runtime.engine.measuring import measure
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh, factors, make_groups
from cp_runtime.engine.ranks.sharding import JointLayout

HEADS, HEAD_DIM, REPETITIONS, GROUPS = 24, 128, 5, 3
device, dtype = own_device(), torch.bfloat16
mesh = SequenceMesh(dist.group.WORLD)


def seconds(config, layout, local):
    """The best of some calls, on the slowest rank."""
    times = []
    for _ in range(REPETITIONS + 1):
        dist.barrier()
        began = time.perf_counter()
        context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout)
        torch.cuda.synchronize()
        times.append(mesh.whole.largest(torch.tensor(time.perf_counter() - began, device=device)).item())
    return min(times[1:])


def group_bytes():
    """Of the device, per process group and rank."""
    here = torch.tensor([device.index, -device.index], device=device)
    highest, lowest = mesh.whole.largest(here).tolist()
    sent, before = torch.zeros(world, device=device), torch.cuda.mem_get_info()[0]
    groups = [make_groups([range(world)], None, None) for _ in range(GROUPS)]
    for group in groups:
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return (before - torch.cuda.mem_get_info()[0]) / (GROUPS * (world if highest == -lowest else 1))


def figures(name, rates):
    """Of a link. `name`: in front of theirs."""
    found = {"latency_us": 1e6 * rates.latency, "GB_per_second": rates.bandwidth / 1e9, "overlap": rates.overlap}
    return {name + key: value for key, value in found.items()}


with torch.inference_mode():
    rates = measure(mesh, device).of(range(world))
    hosts = measure(SequenceMesh(dist.new_group(backend="gloo")), device).of(range(world))
    link = figures("", rates) | figures("shared_memory_", hosts)
    report(**link, TFLOPS=rates.flops / 1e12, MB_of_a_group=group_bytes() / 1e6)
    for total in map(int, lengths.split(",")):
        layout = JointLayout((total,), world)
        local = [torch.randn(1, layout.local_lengths[rank], HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(3)]
        shape = AttentionShape(1, total, total, HEADS, HEADS, HEAD_DIM, dtype.itemsize)
        ms = {
            f"ring {ring} x Ulysses {ulysses}": 1e3
            * seconds(SequenceSettings(rotate_method="alltoall").with_degrees(ring, ulysses), layout, local)
            for ring, ulysses in factors(world)
        }
        ring, ulysses = choose(shape, world, SequenceSettings(), rates)
        report(tokens=total, chosen=f"ring {ring} x Ulysses {ulysses}", ms=ms)
finish()
