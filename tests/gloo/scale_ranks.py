"""Rank script: tokens of one input, quantised on several ranks, against the same rows of the whole input quantised at once."""

from support.ranks import finish, report, start, use_comfyui

rank, world, _ = start()
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from comfy.quant_ops import QuantizedTensor  # noqa: E402
from torch import nn  # noqa: E402

from cp_runtime.comfy.worker.quantised import shared_scales  # noqa: E402
from cp_runtime.engine.collectives import RankGroup  # noqa: E402
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings  # noqa: E402
from cp_runtime.engine.plan import ShardingPlan  # noqa: E402

tokens = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 30.0, 24)[:, None]
own = slice(rank * 8, rank * 8 + 8)


def quantised(values, scale=None):
    return QuantizedTensor.from_float(values, "TensorCoreNVFP4Layout", scale=scale).dequantize()


def difference(out, expected):
    worst = (out - expected).abs().max().reshape(1)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


whole = quantised(tokens)
given = torch.tensor(0.5)
alone = difference(quantised(tokens[own]), whole[own])
ranks = RankGroup(dist.group.WORLD)
with shared_scales(ranks):
    together = difference(quantised(tokens[own]), whole[own])
    from_file = difference(quantised(tokens[own], given), quantised(tokens, given)[own])
after = difference(quantised(tokens), whole)
counts = dict(ranks.stats.counts)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return quantised(x)


model = nn.ModuleList([Block()]).eval()
blocks = CompiledBlocks(model, ShardingPlan(modules={}, outputs={}), CompileSettings(backend="eager"))
compiled = []
with torch.inference_mode():
    for _ in range(2):
        with shared_scales(ranks):
            compiled.append(difference(model[0](tokens[own]), whole[own]))
report(
    alone=alone, together=together, from_file=from_file, after=after, counts=counts, compiled=max(compiled), left=list(blocks.left)
)
finish()
