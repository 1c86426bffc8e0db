"""Rank script: sharded blocks captured as one CUDA graph, messages included, against the same blocks launched one by one.

Arguments: blocks, tokens. Rank 0 reports: whether all ranks' results have the same bits, for the inputs of the capture and for
others, and milliseconds until the host has launched everything and until the device is done.
"""

import time

from support.ranks import finish, own_device, report, start

rank, world, (blocks, tokens) = start()

import torch
import torch.distributed as dist
from torch import nn

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.ranks.collectives import CommStats
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout

HEADS, HEAD_DIM, REPETITIONS = 24, 128, 4
WIDTH = HEADS * HEAD_DIM


class Untimed(CommStats):
    """Statistics without events: those of a capture tell no time."""

    def wait(self, works, device, on_host):
        for work in works:
            work.wait()
        self.pending -= 1


device, dtype = own_device(), torch.bfloat16
mesh, layout = SequenceMesh(dist.group.WORLD, stats=Untimed()), JointLayout((int(tokens),), world)
config = ContextParallelConfig(ring_degree=1, ulysses_degree=world, ulysses_anything=True)
torch.manual_seed(0)
layers = [nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)]).to(device, dtype) for _ in range(int(blocks))]


def forward(x):
    for to_qkv, out in layers:
        q, k, v = to_qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + out(context_parallel_attention(q, k, v, mesh=mesh, config=config, q_layout=layout).flatten(2))
    return x


def milliseconds(run):
    host, whole = [], []
    for _ in range(REPETITIONS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - began))
    return min(host), min(whole)


def on_all(value):
    """The largest of all ranks."""
    return mesh.whole.largest(torch.tensor(float(value), device=device)).item()


with torch.inference_mode():
    inputs = [torch.randn(1, layout.local_lengths[rank], WIDTH, device=device).to(dtype) for _ in range(2)]
    expected = [forward(x).clone() for x in inputs]
    static, side = inputs[0].clone(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # what libraries allocate at first use must not be captured
        forward(static)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events in a thread of its own
        out = forward(static)
    differ = []
    for x, right in zip(inputs, expected, strict=True):
        static.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        differ.append(on_all(not torch.equal(out, right)))
    eager, replayed = milliseconds(lambda: forward(static)), milliseconds(graph.replay)
    times = {"host_ms": eager[0], "ms": eager[1], "graph_host_ms": replayed[0], "graph_ms": replayed[1]}
    report(same_bits=not any(differ), **{name: on_all(value) for name, value in times.items()})
finish()
