"""Rank script: a model whose weights never fill a rank's memory, from a file to calls; rank 0 reports.

Memory is what the kernel says is no page of a file (`RssAnon`). `Private_Dirty` counts pages of a file that was just written, and
that one process has mapped, too.
"""

import gc
import resource
from functools import partial

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.live_bytes import Peak
from support.ranks import answer, finish, report, start, worst
from torch import nn
from torch.nn import functional as F

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    apply_context_parallel,
    map_weights,
)
from cp_runtime.engine.weights.blocks import sizes_of
from cp_runtime.engine.weights.packing import AbsentWeight

rank, world, (file,) = start()

WIDTH = 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(9)), nn.Linear(WIDTH, 64)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


PLAN = {"blocks.0": {"x": ContextParallelInput(1, 3)}, "out": ContextParallelOutput(1, 3)}


def address_space():
    """Bytes that this process has mapped."""
    with open("/proc/self/statm") as line:
        return resource.getpagesize() * int(line.read().split()[0])


def empty():
    with torch.device("meta"):
        return Model().eval()


if rank == 0:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: weight.shape for name, weight in empty().state_dict().items()}
    save_file({name: torch.rand(shape, generator=generator).sub_(0.5).mul_(0.05) for name, shape in shapes.items()}, file)
dist.barrier()
config = ContextParallelConfig(ulysses_degree=world, ulysses_anything=True)
x = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(1))
with torch.inference_mode():
    small = nn.ModuleList([Block()]).eval()  # what the first use of torch and of the ranks takes
    with Peak() as nothing:
        small[0](x)
        dist.barrier(dist.new_group())
    model = empty()
    sizes = sizes_of(model)
    with Peak() as loading:
        map_weights(model, file)
        applied = apply_context_parallel(model, config, PLAN, shard_weights=True)
    with Peak() as calling:
        out = [model(x) for _ in range(2)]
    dist.barrier()
    model = applied = None
    gc.collect()  # its memory goes
    whole = empty()
    with Peak() as read:
        whole.load_state_dict({name: weight.clone() for name, weight in load_file(file).items()}, assign=True)
    apply_context_parallel(whole, config, PLAN)
    expected = whole(x)
    model = empty()
    map_weights(model, file)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + sizes.blocks // 4, limits[1]))
    error = str(answer(RuntimeError, partial(apply_context_parallel, shard_weights=True), model, config, PLAN))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    lost = sum(isinstance(weight, AbsentWeight) for weight in model.parameters())
    map_weights(model, file)
    apply_context_parallel(model, config, PLAN, shard_weights=True)
    after_error = torch.equal(model(x), expected)
report(
    error=error, lost=lost, weights=len(list(model.parameters())), after_error=after_error,
    blocks=sizes.blocks, largest=sizes.largest, rest=sizes.rest, nothing=worst(nothing.bytes), loading=worst(loading.bytes),
    calling=worst(calling.bytes), read=worst(read.bytes), equal=[torch.equal(each, expected) for each in out],
)  # fmt: skip
finish()
