"""Rank script: what is left of a sharded call, and what a trace shows of it. Rank 0 reports.

Argument: what to check.
"""

import gc
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist
from support.ranks import finish, report, start
from torch import nn

from cp_runtime import ContextParallelInput, ContextParallelOutput, ModulePlan, ShardingPlan
from cp_runtime.comfy.rank.attention import attention_override
from cp_runtime.engine.cost import DegreePlanner, Rates
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.profiling import CallTraces

rank, world, (what,) = start()

RATES = Rates(latency=1e-5, bandwidth=1e9, flops=1e11, memory=1e9, overlap=0.0)
seen: list[weakref.ref] = []


def attention(q, k, v, heads, mask=None, *_, **__):
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Block(nn.Module):
    def forward(self, x, pe, options):
        if options.get("fail"):
            raise ValueError("on purpose")
        seen.extend(weakref.ref(tensor) for tensor in (x, pe))
        q = (x + pe).unflatten(-1, (4, 8)).transpose(1, 2)
        out = options["attention"](attention, q, q, q, 4, options["mask"], skip_reshape=True, skip_output_reshape=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Identity()

    def forward(self, x, pe, options):
        for block in self.blocks:
            x = block(x, pe, options)
        return self.out(x)


TOKENS = ("img",)
PLAN = ShardingPlan(
    modules={
        "blocks.*": ModulePlan(
            inputs={"x": ContextParallelInput(1, 3, streams=TOKENS), "pe": ContextParallelInput(1, 3, streams=TOKENS, side=True)},
            attention=TOKENS,
        )
    },
    outputs={"out": ContextParallelOutput(1, 3, stream="img")},
)
model, mesh = Model(), SequenceMesh(dist.group.WORLD)
installed = InstalledPlan(model, PLAN)


def call(fail=False):
    """One call, as a worker makes it; weak references to its tensors are in `seen`."""
    planner = DegreePlanner(SequenceSettings(ring_degree=1, ulysses_degree=world), world, RATES)
    with installed.call(mesh, planner) as running:
        options = {"attention": attention_override(running), "mask": torch.ones(1, 13, 13, dtype=torch.bool), "fail": fail}
        arguments = {"x": torch.randn(1, 13, 32), "pe": torch.randn(1, 13, 32), "options": options}
        running.state.arguments = arguments  # which hold the call itself, by its attention
        seen.extend(map(weakref.ref, (running, arguments["x"], arguments["pe"], options["mask"])))
        return installed.forward(model.forward, **arguments)


if what == "left":
    gc.collect()
    gc.disable()
    for fail in (False, True):
        seen.clear()
        with suppress(ValueError):
            call(fail)
        alive = torch.tensor([sum(ref() is not None for ref in seen)])
        dist.all_reduce(alive)
        report(fail=fail, made=len(seen), alive=alive.item())
else:
    traces = CallTraces(rank)
    for _ in range(5):
        with traces.call():
            call()
finish()
