"""The automatic choice of ranks against every candidate, unequal shares against equal ones, and what the choice costs.

    make bench, or python benchmarks/policy.py [--only choice shares overhead]

choice: 4 real ranks over gloo and real collectives. Link and devices are made up: a collective lasts until its bytes would have
crossed the link of the worst pair (bytes per second and latency set for every pair), a layer as long as its operations would take.
So four ranks are four devices also on two cores. All ranks choose by `engine.policy`, as a pool does, for the calls of one sampling
run; then every candidate is measured, in alternation, with the choice among them. Medians. Wanted: at most 1.10 times the best, at
most 1.05 times one rank.

shares: 2 ranks that really compute, each pinned to a core; another process stops the second one half of the time, for some
milliseconds at a time. (A process that only competes for the core gives it up whenever the rank has slept, in every collective.)
Equal shares against 2:1, in alternation, all modes; the outputs are compared with one process. Wanted: 1.25 times as fast. Needs
two idle cores.

overhead: what choosing and noting adds to a call once the kind of call is known. Wanted: 50 µs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import common
import torch
import torch.distributed as dist
from alternating import alternate, check
from common import show
from support.ranks import of_all, report
from torch import Tensor, nn

from cp_runtime.engine.call import RunningCall
from cp_runtime.engine.config import SequenceSettings
from cp_runtime.engine.cost import AttentionShape, DegreePlanner, Rates
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.measuring import Measured, measure
from cp_runtime.engine.mesh import BatchMesh
from cp_runtime.engine.plan import ModulePlan, ShardingPlan
from cp_runtime.engine.policy import CallSplit, CallWork, Known, Pool, Run, candidates
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput

RANKS = 4
# (bytes per second, seconds) of every pair. The devices do FLOPS operations per second, some hundred times less than a GPU: so does
# the link, and names say what the ratio of both is like.
LINKS: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "NVLink": lambda i, j: (4e9, 2e-5),
    "PCIe 4": lambda i, j: (2e8, 5e-5),
    "PCIe 3 x8, two pairs": lambda i, j: (2e8 if i // 2 == j // 2 else 4e7, 1e-4),
    "10 Gbit/s": lambda i, j: (1.2e7, 2e-4),
    "1 Gbit/s": lambda i, j: (1.2e6, 5e-4),
}
TOKENS = (1024, 8192)
LAYERS, HEADS, HEAD_DIM = 4, 8, 8
HIDDEN = 1024  # of the layers that are only timed
FLOPS = 1e12
CALLS = 10  # of a sampling run
STREAM = ("img",)
WIDTH = 384  # of the layers that really compute
REPETITIONS = 7  # of a comparison of shares


def work_for(tokens: int) -> CallWork:
    """A call: attention of hidden size HIDDEN and the matrix products around it, of which little is really sent and computed."""
    shape = AttentionShape(1, tokens, tokens, HEADS, HEADS, HEAD_DIM, 4)
    return CallWork(1, True, ((shape, LAYERS),), LAYERS * 24.0 * HIDDEN**2 * tokens, LAYERS, tokens * HEADS * HEAD_DIM * 4)


def compute(operations: float) -> None:
    """Take as long as a made-up device takes for so many operations."""
    until(time.perf_counter() + operations / FLOPS)


def until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - 5e-5))


class Crossing:
    """A collective that lasts until its bytes have crossed the made-up link: one port, the slowest first byte.

    Args:
        works: what torch returns for it.
        sizes: bytes to every rank, and from every rank.
    """

    link: Callable[[int, int], tuple[float, float]] | None = None
    """Of a pair of ranks: bytes per second, and latency."""

    def __init__(self, began: float, works: Sequence[Any], *sizes: Mapping[int, int]) -> None:
        self._works, self._due = works, began + max(map(self._seconds, sizes))

    def _seconds(self, sizes: Mapping[int, int]) -> float:
        here = dist.get_rank()
        pairs = [(n, *self.link(*sorted((here, rank)))) for rank, n in sizes.items() if rank != here and n] if self.link else []
        return max((latency for _, _, latency in pairs), default=0.0) + sum(n / bandwidth for n, bandwidth, _ in pairs)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        until(self._due)


def throttle() -> None:
    """Let collectives last as long as the made-up link takes, also for the ranks that receive."""
    plain = dist.batch_isend_irecv  # of which over gloo all messages are made

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        began, sizes = time.perf_counter(), (Counter[int](), Counter[int]())
        for each in operations:
            sizes[each.op is dist.isend][each.peer] += each.tensor.nbytes
        return [Crossing(began, plain(operations), *sizes)]

    dist.batch_isend_irecv = batch_isend_irecv


class Timed(nn.Module):
    """A layer: what it computes is a little attention, how long it takes that of a large one."""

    def forward(self, x: Tensor, call: RunningCall) -> Tensor:
        compute(24.0 * HIDDEN**2 * x.shape[1])
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        if call.attention_is_local:
            return x + attend(*(t.transpose(1, 2) for t in (q, q, q)), None).transpose(1, 2).flatten(2)
        return x + call.attend(q, q, q, attend=attend).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`[B, H, L, D]`. In place of the sum, which would take the time of a real core: the first values."""
    compute(4.0 * q.shape[1] / HEADS * q.shape[2] * k.shape[2] * HIDDEN)
    return q + v[:, :, :1]


class Dense(nn.Module):
    """A layer that really computes."""

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
    """Layers of one kind."""

    def __init__(self, layer: type[nn.Module], layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.out = nn.ModuleList(layer() for _ in range(layers)), nn.Identity()

    def forward(self, x: Tensor, call: RunningCall | None) -> Tensor:
        for block in self.blocks:
            x = block(x, call)
        return self.out(x)


PLAN = ShardingPlan(
    modules={"blocks.*": ModulePlan(inputs={"x": ContextParallelInput(1, 3, streams=STREAM)}, attention=STREAM)},
    outputs={"out": ContextParallelOutput(1, 3, stream="img")},
)


def choice_ranks() -> None:
    """On every rank."""
    mesh = BatchMesh(dist.group.WORLD)
    installed, settings = InstalledPlan(Model(Timed, LAYERS), PLAN), SequenceSettings(rotate_method="allgather")
    throttle()
    for name, link in LINKS.items():
        Crossing.link = staticmethod(link)
        measured = measure(mesh.sequence(), torch.device("cpu"))
        # Devices are made up, the link is measured as ever. Attention is timed for a hidden size of HIDDEN, and has less.
        attention = FLOPS * HEADS * HEAD_DIM / HIDDEN
        each = tuple(replace(rates, flops=attention, linear=FLOPS, memory=1e12, overlap=0.0) for rates in measured.each)
        pool = Pool(replace(measured, each=each), (), settings)
        for tokens in TOKENS:
            choice(name, tokens, mesh, installed, pool)


def choice(name: str, tokens: int, mesh: BatchMesh, installed: InstalledPlan[ShardingPlan], pool: Pool) -> None:
    x, work = torch.zeros(1, tokens, HEADS * HEAD_DIM), work_for(tokens)

    def run(split: CallSplit) -> Run:
        """A call; every rank gets the same times."""
        team = mesh.team(split.ranks, split.groups, split.ring, split.ulysses)
        own = (0.0, 0.0)
        dist.barrier()
        mesh.stats.reset()
        began = time.perf_counter()
        if team is not None:
            sequence = team.sequence(split.batch)
            forced = replace(pool.settings, ring_degree=split.ring, ulysses_degree=split.ulysses)
            planner = DegreePlanner(forced, sequence.size, pool.measured.of(split.ranks))
            with installed.call(sequence, planner) as call:
                installed.forward(installed.model.forward, x, call)
            own = (time.perf_counter() - began, mesh.stats.seconds)
        busy = [times for rank, times in enumerate(of_all(own)) if rank in split.ranks]
        return Run(max(s for s, _ in busy), max(s - c for s, c in busy), min(c for _, c in busy))

    # What the planner of a pool takes for a call that it does not know.
    planner = DegreePlanner(pool.settings, pool.size, pool.measured.of(tuple(range(pool.size))))
    default = CallSplit(tuple(range(mesh.size)), 1, *planner(work.attentions[0][0]).mesh_shape)
    known = Known(work, default)
    known.note(default, run(default))
    for _ in range(CALLS):
        split = known.choose(pool, lambda _: True)
        known.note(split, run(split))
    chosen = min(known.runs, key=lambda split: known.runs[split].seconds)  # the next call may still try another one
    times: dict[CallSplit, list[float]] = {split: [] for split in candidates(work, pool)}
    # Of short calls more: four processes on two cores differ by a tenth of such a call from one to the next.
    for _ in range(max(2, min(15, round(1 / known.runs[chosen].seconds)))):
        for split, found in times.items():
            found.append(run(split).seconds)
    seconds = {split: median(found) for split, found in times.items()}
    best, one = min(seconds, key=lambda split: seconds[split]), next(split for split in seconds if split.ranks == (0,))
    report(
        name=f"{name}, {tokens} tokens",
        chosen=describe(chosen),
        best=describe(best),
        s=seconds[chosen],
        to_best=seconds[chosen] / seconds[best],
        to_one_rank=seconds[chosen] / seconds[one],
        tried=len(known.runs),
    )


def describe(split: CallSplit) -> str:
    return f"{split.at_work} (ring {split.ring} x ulysses {split.ulysses})" if split.at_work > 1 else "1"


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


def shares_ranks() -> None:
    """On every rank."""
    rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    model, x = Model(Dense, 2), torch.randn(1, 2048, WIDTH, generator=torch.Generator().manual_seed(1))
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
            report(name="shares 2:1 / equal", ratios=ratios, largest_difference=worst, **seconds)
    finally:
        if rival is not None:
            rival.terminate()
            rival.wait()


def overhead() -> float:
    """Seconds that choosing and noting add to a call of a known kind."""
    os.environ.setdefault("COMFYUI_PATH", "")
    from support.reports import call_report

    from cp_runtime.controller.calls import CallKind, Chooser
    from cp_runtime.controller.placement import Shortages
    from cp_runtime.pool.config import DeviceInventory, RuntimeConfig

    rates = Rates(latency=2e-5, bandwidth=1e10, flops=1e14, memory=1e12, overlap=1.0, linear=1e14, launch=5e-6)
    measured = Measured((rates,) * 8, (), (0,) * 8)
    made = SimpleNamespace(measured=measured, shares=(), device_names=["x"] * 8, backend="nccl", peer_to_peer=True, world_size=8)
    config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cuda", count=8))
    chooser: Any = Chooser(made, Shortages())  # type: ignore[arg-type]
    arguments = {"x": torch.zeros(2, 16, 128, 128), "timestep": torch.zeros(2), "context": torch.zeros(2, 512, 64)}
    arguments |= {"transformer_options": {"sample_sigmas": torch.zeros(21)}}
    shape = AttentionShape(1, 4608, 4608, 24, 24, 128, 2)
    work = CallWork(items=2, sequence=True, attentions=((shape, 57),), operations=1e14)
    report_ = call_report(1.0, 0.1, modules=57, nbytes=1, work=work, degrees={"batch": 2, "ring": 1, "ulysses": 4})
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        chosen = chooser.choose(config, CallKind.of(("key", "forward", False, None), arguments), False, lambda _: True)
        chooser.note(config, chosen, [report_] * 8, False)
        times.append(time.perf_counter() - began)
    return median(times[100:])


@torch.inference_mode()
def rank_main(what: str) -> None:
    {"choice": choice_ranks, "shares": shares_ranks}[what]()


def main() -> None:
    parts = ("choice", "shares", "overhead")
    options = common.options(__doc__, only={"nargs": "+", "choices": parts, "default": parts})
    show("policy", **common.machine())
    if "choice" in options.only:
        found = common.show_ranks(__file__, RANKS, what="choice")
        behind, alone = (max(row[to] for row in found) for to in ("to_best", "to_one_rank"))
        show("best candidate / choice", {"worst": 1 / behind}, wanted=1 / 1.10)
        show("one rank / choice", {"worst": 1 / alone}, wanted=1 / 1.05)
    if "shares" in options.only:
        common.show_ranks(__file__, 2, what="shares")
    if "overhead" in options.only:
        common.comfyui()
        show("choosing and noting", us_per_call=overhead() * 1e6, wanted=50)


if __name__ == "__main__":
    common.run(main, rank_main)
