"""Stages of a model over links of several speeds, against one device and the other ways to use two.

    python benchmarks/pipeline.py [--quick]    (root, `ip` and `tc`: ranks have network namespaces of their own)

A Wan, whose blocks are all of one kind, smaller in width and depth, on two CPU ranks of a thread each, over a pair of virtual
network cards whose speed `tc tbf` limits. All variants run in the same processes, in alternation. What one device takes is rank 0's
time while rank 1 sleeps.

× one device: one device's seconds / these. PipeFusion is in 8 patches, after a call that fills its keys and values; as inputs stay
the same, all variants are checked against one device. `--errors`: of whole sampling runs, root mean square in standard deviations
of the latent.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import common

RANKS, PATCHES = 2, 8
TOLERANCE = 1e-4  # in standard deviations of the output
LINKS = {"not limited": None, "1 Gbit/s": 1000, "400 Mbit/s": 400}  # Mbit/s
SIZES = dict(dim=512, num_heads=4, ffn_dim=2048, num_layers=8)
FRAMES, SIDE, TEXT = 2, 48, 64  # of the latent; tokens
CLONE_NEWNET = 0x40000000


def enter(rank: int) -> None:
    """Have this process use the network card of its rank only."""
    with open(f"/run/netns/cp{rank}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = f"cp{rank}"


def rank_main() -> None:
    enter(int(sys.argv[1]))
    from support.ranks import finish, report, start, use_comfyui

    rank, _, (given,) = start()
    settings = json.loads(given)
    use_comfyui()
    import torch
    import torch.distributed as dist
    from alternating import alternate, check, keep_freed_memory
    from support import families
    from support.families import wan
    from support.models import build

    sys.path.append(str(common.ROOT / "tests" / "ranks" / "families"))
    from family_stock import forward
    from sharded_call import call, in_mode, staged_call

    from cp_runtime.engine.hooks import InstalledPlan
    from cp_runtime.engine.mesh import BatchMesh
    from cp_runtime.engine.pipeline.pipeline import Pipeline
    from cp_runtime.engine.pipeline.settings import PipelineSettings
    from cp_runtime.engine.pipeline.stages import Stages, cut, staged_blocks
    from cp_runtime.families import plan_for

    keep_freed_memory()
    spec = families.Model("comfy.ldm.wan.model.WanModel", {**wan.WAN, **SIZES}, "WAN21_T2V", init=wan.init)
    model, mesh = build(spec), BatchMesh(dist.group.WORLD)
    inputs = wan.wan(frames=FRAMES, height=SIDE, width=SIDE, text=TEXT)
    plan = InstalledPlan(model, plan_for(model))
    blocks = staged_blocks(model, plan.plan)
    owners = cut([block.nbytes for block in blocks], RANKS)

    def staged(patches: int) -> Any:
        pipeline = Pipeline(Stages(blocks, owners, mesh.stage(RANKS).lane), mesh.whole)
        told = PipelineSettings(stages=RANKS, patches=patches)

        def run() -> torch.Tensor | None:
            out = staged_call(plan, pipeline, inputs, {}, mesh, told)
            return out if rank == 0 else None  # the last stage

        return run

    def shared(ring: int, ulysses: int) -> Any:
        return lambda: call(plan, inputs, {}, mesh, in_mode(ring, ulysses, "alltoall"))[0]

    with torch.no_grad():
        expected = forward(model, inputs, {})
        variants = {
            "one device": lambda: forward(model, inputs, {}) if rank == 0 else None,
            "Ulysses": shared(1, RANKS),
            "ring": shared(RANKS, 1),
            "exact stages": staged(1),
            f"PipeFusion, {PATCHES} patches": staged(PATCHES),
        }
        for name, variant in variants.items():
            for _ in range(2):
                check(name, variant(), expected, TOLERANCE, expected.std())
        times = alternate(variants, settings["repetitions"])
    alone = times["one device"]
    for name, each in times.items():
        report(
            name=f"{settings['link']}, {name}",
            ratios={} if each is alone else {"× one device": alone.median / each.median},
            seconds=each.median,
            others=each.others,
        )
    whole = sum(parameter.nbytes for parameter in model.parameters())
    outside = whole - sum(block.nbytes for block in blocks)
    for stage in range(RANKS):
        own = sum(block.nbytes for block, owner in zip(blocks, owners, strict=True) if owner == stage)
        report(
            name=f"{settings['link']}, weights of stage {stage}", MB=(own + outside) / 1e6, whole=whole / 1e6, outside=outside / 1e6
        )
    finish()


def connect(stack: ExitStack, rate: int | None) -> None:
    """Make a namespace for each rank and a cable between them, of so many Mbit/s."""

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    for rank in range(RANKS):
        run("ip", "netns", "add", f"cp{rank}")
        stack.callback(partial(run, "ip", "netns", "delete", f"cp{rank}"))
    run("ip", "link", "add", "cp0", "netns", "cp0", "type", "veth", "peer", "name", "cp1", "netns", "cp1")
    for rank in range(RANKS):
        inside = ("ip", "-n", f"cp{rank}")
        run(*inside, "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"cp{rank}")
        run(*inside, "link", "set", f"cp{rank}", "up")
        run(*inside, "link", "set", "lo", "up")
        if rate is not None:
            limit = ("rate", f"{rate}mbit", "burst", "256kb", "latency", "400ms")
            run("ip", "netns", "exec", f"cp{rank}", "tc", "qdisc", "add", "dev", f"cp{rank}", "root", "tbf", *limit)


def show_errors() -> None:
    """Sample tiny models with random weights on a server, in patches and on one device: how far apart the latents are."""
    from support.graphs import flux_prompt, wan_prompt
    from support.server import ComfyServer

    prompts = {"flux": flux_prompt, "wan_t2v": wan_prompt}
    with common.models(*prompts) as models, ComfyServer(common.comfyui(), models=models) as server:
        for name, prompt in prompts.items():
            for cfg, steps in ((1.0, 8), (1.0, 20), (1.0, 50), (4.0, 20)):
                exact, found = server.sample(prompt(steps=steps, cfg=cfg)), []
                for patches, warmup in ((2, 1), (4, 1), (8, 1), (8, 2)):
                    told = {"stages": 2, "patches": patches, "warmup_calls": warmup}
                    out = server.sample(prompt(steps=steps, cfg=cfg, cp={"world_size": 2}, pipefusion=told))
                    found.append(f"{patches}/{warmup} {((out - exact).pow(2).mean().sqrt() / exact.std()).item():.4f}")
                print(f"{name}, {steps} steps, CFG {cfg:g}; patches/warm-up error: {', '.join(found)}", flush=True)


def main() -> None:
    errors = {"action": "store_true", "help": "instead: how far the latents of sampling runs in patches are from exact ones"}
    options = common.options(__doc__, "two links and few repetitions", errors=errors)
    if options.errors:
        show_errors()
        return
    common.comfyui()
    for link, rate in list(LINKS.items())[:: 2 if options.quick else 1]:
        with ExitStack() as stack:
            connect(stack, rate)
            common.show_ranks(__file__, RANKS, link=link, repetitions=3 if options.quick else 7)


if __name__ == "__main__":
    if len(sys.argv) > 3 and Path(sys.argv[3]).name == "store":
        rank_main()
    else:
        main()
