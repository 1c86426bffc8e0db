"""Rank script: what users do to a module besides calling it. Every check runs on all ranks; rank 0 reports the worst."""

import copy
import gc
import weakref
from collections import namedtuple

import torch
import torch.distributed as dist
from support.ranks import finish, report, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

rank, world, _ = start()

from cp_runtime import (  # noqa: E402
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.errors import ConfigError, PlanError  # noqa: E402

Sample = namedtuple("Sample", ["sample", "extra"])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (2, 8, 3)).transpose(1, 2).unbind(-1)  # the last dimension is not the innermost
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Attention(), Attention(), nn.Linear(16, 16)

    def forward(self, x, mask=None):
        x = self.first(x, mask)
        if mask is not None:
            mask[:, ::2] = -torch.inf  # in place, between two attentions
        return Sample(self.out(self.second(x, mask)), "text")


def new():
    torch.manual_seed(0)
    return Model().eval()


PLAN = {"first": {"x": ContextParallelInput(1, 3)}, "out": ContextParallelOutput(1, 3)}
RING = ContextParallelConfig(ring_degree=world, rotate_method="alltoall", ring_anything=True)
x, mask = torch.randn(2, 13, 16, generator=torch.Generator().manual_seed(1)), torch.randn(13, 13)
dist.broadcast(mask, 0)


def refused(run, error, *words, given=None):
    try:
        run() if given is None else run(given)
    except error as caught:
        return all(word in str(caught) for word in words)
    return False


def check(name, held):
    worst = torch.tensor([0.0 if held else 1.0])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    report(name=name, held=worst.item() == 0)


with torch.no_grad():
    model, expected, expected_masked = new(), new()(x), new()(x, mask.clone())
    apply_context_parallel(model, RING, PLAN)
    out = model(x)
    check("named tuple", type(out) is Sample and out.extra == "text" and (out.sample - expected.sample).abs().max() < 1e-5)
    out = model(x, mask.clone())
    check("mask changed in place", (out.sample - expected_masked.sample).abs().max() < 1e-5)
    check("no batch", model(x[:0]).sample.shape == (0, 13, 16))
    check("copy", refused(lambda: copy.deepcopy(model)(x), PlanError, "copy"))
    check("applied twice", refused(lambda: apply_context_parallel(model, RING, PLAN), PlanError, "already"))
    check("part of an applied one", refused(lambda: apply_context_parallel(model.first, RING, PLAN), PlanError, "already"))
    around = nn.Sequential(model)
    check("around an applied one", refused(lambda: apply_context_parallel(around, RING, {}), PlanError, "already"))
    model.train()
    check("training mode", refused(lambda: model(x), PlanError, "eval()"))
    model.eval()
    with torch.enable_grad():
        check("gradients", refused(lambda: model(x), PlanError, "torch.no_grad()"))
    theirs = model.forward
    model.forward = lambda *args: theirs(*args)
    remove_context_parallel(model)
    check("another wrapper stays", "forward" in vars(model) and torch.equal(model(x).sample, expected.sample))

    model = new()
    apply_context_parallel(model, RING, PLAN).remove()
    check("removed by its handle", "forward" not in vars(model) and torch.equal(model(x).sample, expected.sample))
    apply_context_parallel(model, RING, PLAN)
    gone = weakref.ref(model)
    model = around = None
    gc.collect()
    check("freed without being removed", gone() is None)
    wrong = {**PLAN, "first": {"x": ContextParallelInput(-4, 3)}}
    apply_context_parallel(model := new(), RING, wrong)
    check("no such dimension", refused(model.forward, PlanError, "-4", given=x))
    if world == 4:
        turned = DeviceMesh("cpu", torch.arange(4).reshape(2, 2).T, mesh_dim_names=("ring", "ulysses"))
        config = ContextParallelConfig(ring_degree=2, ulysses_degree=2, mesh=turned)
        check("mesh turned around", refused(lambda: apply_context_parallel(new(), config, PLAN), ConfigError, "ascending"))
finish()
