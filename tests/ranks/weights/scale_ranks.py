"""Rank script: tokens of one input, quantised on several ranks, against the same rows of the whole input quantised at once."""

import json
from unittest.mock import patch

import comfy.model_management
import comfy.ops
import torch
import torch.distributed as dist
from comfy.quant_ops import QuantizedTensor
from support.ranks import answer, finish, report, start, worst
from torch import nn

from cp_runtime.comfy.rank.quantised import multiplied_natively, own_formats, shared_scales
from cp_runtime.comfy.shared.formats import KINDS
from cp_runtime.comfy.shared.values import Facts
from cp_runtime.comfy.ui.obstacles import check_experts
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
from cp_runtime.engine.plan import ShardingPlan
from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.errors import UnsupportedError

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


def refused(layout, able):
    """What is said about experts of a format on a device that can multiply NVFP4 or not."""
    block = nn.ModuleDict({"gate": nn.Linear(64, 4), "experts": nn.ModuleList([nn.Linear(64, 64)])})
    weight = QuantizedTensor.from_float(block["experts"][0].weight.detach(), layout) if layout else torch.ones(64, 64)
    block["experts"][0].weight = nn.Parameter(weight, requires_grad=False)
    with patch.object(comfy.model_management, "supports_nvfp4_compute", lambda device: able):
        return answer(UnsupportedError, check_experts, nn.ModuleDict({"block": block}), ["cpu", "cpu"]) or ""


def linear(kind, layout, kinds):
    """The results of a quantised layer on a device that multiplies in every format, among devices that have `kinds` in common:
    with them, alone, and with them again."""
    state = QuantizedTensor.from_float(torch.linspace(-1, 1, 64 * 64).view(64, 64), layout).state_dict("weight")
    state["comfy_quant"] = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
    layer = comfy.ops.mixed_precision_ops(compute_dtype=torch.float32).Linear(64, 64, bias=False, dtype=torch.float32)
    layer.load_state_dict(state, strict=False)
    with patch.multiple(comfy.model_management, **dict.fromkeys(SUPPORTS, lambda device: True)), torch.no_grad():
        own, cast = own_formats(nn.ModuleList([layer]), Facts(True, None, None, False, False), torch.device("cpu"), kinds)
        before = layer(tokens)
        with multiplied_natively(cast):
            alone = layer(tokens)
        return own, before, alone, layer(tokens)


SUPPORTS = ("supports_fp8_compute", "supports_mxfp8_compute", "supports_nvfp4_compute")
mixed = {}
for kind, layout in (("nvfp4", "TensorCoreNVFP4Layout"), ("float8_e4m3fn", "TensorCoreFP8E4M3Layout")):
    native, cast, other = (linear(kind, layout, kinds) for kinds in (KINDS.values(), (), (KINDS[kind],)))
    exact = tokens @ QuantizedTensor.from_float(torch.linspace(-1, 1, 64 * 64).view(64, 64), layout).dequantize().T
    mixed[kind] = {
        "formats": [native[0], cast[0], other[0]],
        "native": difference(native[1], exact),
        "cast": difference(cast[1], exact),
        "common": difference(other[1], native[1]),
        "alone": max(difference(each[2], native[1]) for each in (native, cast, other)),
        "again": max(difference(each[3], each[1]) for each in (native, cast, other)),
    }
nvfp4, fp8 = "TensorCoreNVFP4Layout", "TensorCoreFP8E4M3Layout"
experts = [refused(*case) for case in ((nvfp4, True), (nvfp4, False), (fp8, True), ("", True))]
report(experts=experts, alone=alone, together=together, from_file=from_file, after=after, counts=counts)
report(mixed=mixed)
report(compiled=max(compiled), left=list(blocks.left))
finish()
