"""Unequal shares against equal ones, on two ranks of which one is slower.

    make bench, or python benchmarks/shares.py

Both really compute, each pinned to a core; another process stops the second one half of the time, for some milliseconds at a time.
(A process that only competes for the core gives it up whenever the rank has slept, in every collective.) Equal shares against 2:1,
in alternation, all modes; the outputs are compared with one process. Wanted: 1.25 times as fast. Needs two idle cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import common
import torch
import torch.distributed as dist
from alternating import alternate, check
from common import show
from support.ranks import report
from torch import Tensor, nn

from cp_runtime.engine.call import RunningCall
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.plan import ModulePlan, ShardingPlan
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput

STREAM = ("img",)
WIDTH, LAYERS, TOKENS = 384, 2, 2048
REPETITIONS = 7


class Dense(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, call: RunningCall | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 12, -1)).unbind(2)
        if call is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        else:
            attended = call.attend(q, k, v)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.out = nn.ModuleList(Dense() for _ in range(LAYERS)), nn.Identity()

    def forward(self, x: Tensor, call: RunningCall | None) -> Tensor:
        for block in self.blocks:
            x = block(x, call)
        return self.out(x)


PLAN = ShardingPlan(
    modules={"blocks.*": ModulePlan(inputs={"x": ContextParallelInput(1, 3, streams=STREAM)}, attention=STREAM)},
    outputs={"out": ContextParallelOutput(1, 3, stream="img")},
)


HOLD = """
import os, signal, sys, time
rank, ending = int(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
while not ending and os.getppid() == rank:
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(rank, sign)
        time.sleep(0.003)
"""
MODES = {"ulysses": (1, 2, "allgather"), "ring alltoall": (2, 1, "alltoall"), "ring allgather": (2, 1, "allgather")}


@torch.inference_mode()
def rank_main() -> None:
    """On every rank."""
    rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    model, x = Model(), torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    installed, whole = InstalledPlan(model, PLAN), model(x, None)
    meshes = {name: BatchMesh(dist.group.WORLD, shares=s).sequence() for name, s in (("equal", ()), ("2:1", (2, 1)))}

    def run(config: Any, shares: str) -> Tensor:
        with installed.call(meshes[shares], lambda shape: config) as call:
            return installed.forward(model.forward, x, call)

    rival = subprocess.Popen([sys.executable, "-c", HOLD, str(os.getpid())]) if rank == 1 else None
    try:
        for mode, (ring, ulysses, method) in MODES.items():
            config = SequenceSettings(rotate_method=method).with_degrees(ring, ulysses)  # type: ignore[arg-type]
            variants = {shares: partial(run, config, shares) for shares in meshes}
            worst = max(check(mode, call(), whole, torch.inf, whole.std()) for call in variants.values())
            times = {shares: each.median for shares, each in alternate(variants, REPETITIONS).items()}
            seconds = {f"{shares} s": value for shares, value in times.items()}
            ratios = {mode: times["equal"] / times["2:1"]}
            report(name="2:1 / equal", ratios=ratios, largest_difference=worst, **seconds)
    finally:
        if rival is not None:
            rival.terminate()
            rival.wait()


def main() -> None:
    common.options(__doc__)
    show("shares", **common.machine())
    common.show_ranks(__file__, 2)


if __name__ == "__main__":
    common.run(main, rank_main)
