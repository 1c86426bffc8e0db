"""Stages of a model over links of several speeds, against one device and the other ways to use two.

    python benchmarks/pipeline.py [--quick] [--repetitions 5]    # as root, on Linux
    python benchmarks/pipeline.py --errors

A Wan with heads of its own size, smaller in width and depth, on two CPU ranks of a thread each. Each rank is in a network
namespace of its own (`links`), and `tc` limits what it sends. All variants run in the same processes, in alternation. What one
device takes is rank 0's time while rank 1 sleeps.

× one device: one device's seconds / these. PipeFusion is in 8 patches, after a call that fills its keys and values; as inputs stay
the same, all variants are checked against one device. `--errors`: of whole sampling runs, root mean square in standard deviations
of the latent.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import common

RANKS, PATCHES = 2, 8
TOLERANCE = 1e-4  # in standard deviations of the output
LINKS = {"not limited": math.inf, "400 Mbit/s": 50e6, "50 Mbit/s": 6.25e6}  # bytes per second
SIZES = dict(dim=512, num_heads=4, ffn_dim=2048, num_layers=8)
FRAMES, SIDE, TEXT = 4, 64, 64  # of the latent; tokens
ERRORS = ((1.0, 8), (1.0, 20), (1.0, 50), (4.0, 20))  # CFG, steps
SETTINGS = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 3))  # patches, warm-up calls


def rank_main(repetitions: int, names: list[str]) -> None:
    from support.ranks import report, use_comfyui

    use_comfyui()
    import torch
    import torch.distributed as dist
    from alternating import alternate, check, keep_freed_memory
    from links import limit
    from support import families
    from support.families import wan
    from support.models import build

    sys.path.append(str(common.ROOT / "tests" / "ranks" / "families"))
    from family_stock import forward
    from sharded_call import call, in_mode, staged_call

    from cp_runtime.engine.hooks import InstalledPlan
    from cp_runtime.engine.pipeline.pipeline import Pipeline
    from cp_runtime.engine.pipeline.stages import Stages, cut, staged_blocks
    from cp_runtime.engine.ranks.config import PipelineSettings
    from cp_runtime.engine.ranks.mesh import BatchMesh
    from cp_runtime.families import plan_for

    keep_freed_memory()
    rank = dist.get_rank()
    spec = families.Model("comfy.ldm.wan.model.WanModel", {**wan.WAN, **SIZES}, "WAN21_T2V", init=wan.init)
    model, mesh = build(spec), BatchMesh(dist.group.WORLD)
    inputs = wan.wan(frames=FRAMES, height=SIDE, width=SIDE, text=TEXT)
    plan = InstalledPlan(model, plan_for(model))
    blocks = staged_blocks(model, plan.plan)
    owners = cut([block.nbytes for block in blocks], RANKS)

    def staged(patches: int) -> Any:
        pipeline = Pipeline(Stages(blocks, owners, mesh.stage(RANKS).pipeline_group), mesh.whole)
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
        for link in names:
            limit(LINKS[link])
            times = alternate(variants, repetitions)
            alone = times["one device"]
            for name, each in times.items():
                report(
                    name=f"{link}, {name}",
                    ratios={} if each is alone else {"× one device": alone.median / each.median},
                    seconds=each.median,
                    others=each.others,
                )
    whole = sum(parameter.nbytes for parameter in model.parameters())
    outside = whole - sum(block.nbytes for block in blocks)
    for stage in range(RANKS):
        own = sum(block.nbytes for block, owner in zip(blocks, owners, strict=True) if owner == stage)
        report(name=f"weights of stage {stage}", MB=(own + outside) / 1e6, whole=whole / 1e6, outside=outside / 1e6)


def show_errors() -> None:
    """Sample tiny models with random weights on a server, in patches and on one device: how far apart the latents are."""
    from support.graphs import flux_prompt, wan_prompt
    from support.server import ComfyServer

    prompts = {"flux": flux_prompt, "wan_t2v": wan_prompt}
    with common.models(*prompts) as models, ComfyServer(common.comfyui(), models=models) as server:
        for name, prompt in prompts.items():
            for cfg, steps in ERRORS:
                exact, found = server.sample(prompt(steps=steps, cfg=cfg)), []
                for patches, warmup in SETTINGS:
                    told = {"stages": 2, "patches": patches, "warmup_calls": warmup}
                    out = server.sample(prompt(steps=steps, cfg=cfg, cp={"world_size": 2}, pipefusion=told))
                    found.append(f"{patches}/{warmup} {((out - exact).pow(2).mean().sqrt() / exact.std()).item():.4f}")
                print(f"{name}, {steps} steps, CFG {cfg:g}; patches/warm-up error: {', '.join(found)}", flush=True)


def main() -> None:
    errors = {"action": "store_true", "help": "instead: how far the latents of sampling runs in patches are from exact ones"}
    options = common.options(__doc__, "two links and three repetitions", repetitions=5, errors=errors)
    if options.errors:
        show_errors()
        return
    if os.geteuid() != 0 or sys.platform != "linux":
        common.show("pipeline", not_run="network namespaces need Linux and root")
        return
    from links import namespaces

    common.comfyui()
    common.show("pipeline", **common.machine(), dtype="float32", threads_per_rank=1, **SIZES)
    with namespaces(RANKS):
        names = list(LINKS)[:: 2 if options.quick else 1]
        common.show_ranks(__file__, RANKS, repetitions=3 if options.quick else options.repetitions, names=names)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        from links import enter_namespace

        enter_namespace()
    common.run(main, rank_main)
