"""Rank script: tokens of one input, quantised on several ranks, against the same rows of the whole input quantised at once."""

import torch
import torch.distributed as dist
from comfy.ldm.hidream.model import MOEFeedForwardSwiGLU
from comfy.ldm.hunyuan3dv2_1.hunyuandit import MoEBlock
from comfy.quant_ops import QuantizedTensor
from support.ranks import finish, report, start, worst
from torch import nn

from cp_runtime.comfy.rank.quantised import Experts, shared_scales
from cp_runtime.engine.collectives import RankGroup
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
from cp_runtime.engine.plan import ShardingPlan

rank, world, _ = start()

tokens = torch.randn(21, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 30.0, 21)[:, None]
own = slice(rank * 7, rank * 7 + 7)


def quantised(values, scale=None):
    return QuantizedTensor.from_float(values, "TensorCoreNVFP4Layout", scale=scale).dequantize()


def difference(out, expected):
    return worst((out - expected).abs().max())


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
with torch.no_grad():
    for _ in range(2):
        with shared_scales(ranks):
            compiled.append(difference(model[0](tokens[own]), whole[own]))


class Linear(nn.Linear):
    """Rounds its input as ComfyUI's layers of NVFP4 do."""

    def forward(self, x):
        return super().forward(quantised(x.reshape(-1, x.shape[-1])).reshape(x.shape))


class Operations:
    Linear = Linear


def experts(cls, *args, **kwargs):
    """How far a block with experts is from one process: of two experts with tokens on every rank, two have none."""
    torch.manual_seed(0)
    block = cls(64, *args, operations=Operations, **kwargs).eval()
    wanted = torch.stack([torch.eye(4)[expert] + torch.eye(4)[expert + 1] for expert in range(world)])
    block.gate.weight = nn.Parameter(torch.cat([9 * torch.eye(4), torch.zeros(4, 60)], 1))
    x = tokens.view(1, 21, 64).clone()
    x[..., :4] = wanted.repeat_interleave(7, 0) + 0.01 * torch.randn(21, 4)
    right, _ = block(x), Experts.find(block)
    began = ranks.stats.counts["all_reduce"]
    with shared_scales(ranks):
        far = difference(block(x[:, own]), right[:, own])
    return far / right.abs().max().item(), ranks.stats.counts["all_reduce"] - began


with torch.inference_mode():
    moe = [experts(MOEFeedForwardSwiGLU, 96, 4, 2), experts(MoEBlock, 4, 2, ff_inner_dim=96)]
report(experts=moe, alone=alone, together=together, from_file=from_file, after=after, counts=counts)
report(compiled=max(compiled), left=list(blocks.left))
finish()
