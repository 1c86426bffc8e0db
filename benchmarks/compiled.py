"""Compiled blocks: seconds per call of eager and compiled ones, on one rank and on two, and what compiling takes.

    make bench, or COMFYUI_PATH=... python benchmarks/compiled.py [--quick] [--matrix]

A Flux of ComfyUI, smaller in width and depth, with random weights, on CPU ranks over gloo, one thread each; eager and compiled in
alternation, in one run. *first*: seconds of the first compiled call with an empty cache; *cached*: of the first one in a new
process. `--matrix` measures no time: it runs Flux, Wan, Qwen-Image, SD3, Z-Image and LTX-Video as the tests do
(tests/ranks/families/compiled_ranks.py), but with inductor and in every mode, and prints the largest difference from one process
and how many graphs were compiled when.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import torch
import torch.distributed as dist
from alternating import alternate, check
from common import ROOT, show
from support.ranks import COMFY, report, run_ranks, use_comfyui

sys.path.insert(0, str(ROOT / "tests" / "ranks" / "families"))
CASES = (
    ("flux", "flux"), ("wan", "wan t2v"), ("qwen_image", "qwen text mask"), ("sd3", "sd3.5 medium"), ("lumina", "z-image"),
    ("ltxv", "ltxv"),
)  # fmt: skip
# ring degree, Ulysses degree, rotate method, batch degree
MODES = ((1, 2, "allgather", 1), (2, 1, "alltoall", 1), (2, 1, "allgather", 1), (1, 3, "allgather", 1), (3, 1, "alltoall", 1))
SIZE = dict(hidden_size=768, num_heads=6, depth=2, depth_single_blocks=2, mlp_ratio=4.0, axes_dim=[32, 48, 48])
# Else inductor tries every set of instructions of the processor with a program: half a minute. On a GPU it does not.
INDUCTOR = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@torch.inference_mode()
def rank_main(side: int, repetitions: int) -> None:
    use_comfyui()

    from sharded_call import call, in_mode
    from support.families.flux import MODELS, flux
    from support.models import build

    from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
    from cp_runtime.engine.hooks import InstalledPlan
    from cp_runtime.engine.ranks.mesh import BatchMesh
    from cp_runtime.families import plan_for

    spec = MODELS["flux"]
    model = build(replace(spec, arguments={**spec.arguments, **SIZE}))
    inputs, mesh = flux(height=side, width=side, text=64), BatchMesh(dist.group.WORLD)
    installed, config = InstalledPlan(model, plan_for(model)), in_mode(1, mesh.size)

    def run(compiled: bool) -> torch.Tensor:
        blocks = CompiledBlocks(model, installed.plan, CompileSettings()) if compiled else None
        out, _ = call(installed, inputs, {}, mesh, config)
        if blocks is not None:
            blocks.remove()
        return out

    expected = run(False)
    began = time.perf_counter()
    out = run(True)
    first = time.perf_counter() - began
    difference = check("compiled", out, expected, torch.inf, expected.std())
    times = alternate({"eager": partial(run, False), "compiled": partial(run, True)}, repetitions)
    report(first=first, difference=difference, **{name: each.median for name, each in times.items()})


def time_main(side: int, repetitions: int) -> None:
    rows = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as cache:
            os.environ.update(INDUCTOR, TORCHINDUCTOR_CACHE_DIR=cache)
            settings = [json.dumps({"side": side, "repetitions": count}) for count in (repetitions, 1)]
            row, again = (run_ranks(Path(__file__), ranks, each, timeout=1200)[0] for each in settings)
        rows[ranks] = row
        ratios = {"eager / compiled": row["eager"] / row["compiled"]}
        show(f"{ranks} ranks", ratios, cached=again["first"], **{f"s {name}": value for name, value in row.items()})
    for name in ("eager", "compiled"):
        show(f"{name} blocks", {"1 rank / 2 ranks": rows[1][name] / rows[2][name]})


def matrix_main() -> None:
    script = ROOT / "tests" / "ranks" / "families" / "compiled_ranks.py"
    prepare = sorted({family for family, _ in CASES})
    for ring, ulysses, method, batch in MODES:
        arguments = (str(ring), str(ulysses), method, str(batch), "inductor", json.dumps(CASES))
        rows = run_ranks(
            script, ring * ulysses * batch, *arguments, timeout=3600, preload=(*COMFY, "family_stock"), prepare=prepare
        )
        for row in (row for row in rows if row["case"] != "removed"):
            worst = max(row["differences"].values())
            name = f"ring {ring} ({method}), ulysses {ulysses}: {row['case']}"
            show(name, difference=worst, graphs=str(row["graphs"]), breaks=row["breaks"], s=row["seconds"])
            print(*(f"    {failure}" for failure in row["failures"]), sep="\n", end="", flush=True)


def main() -> None:
    matrix = {"default": False, "help": "every family and mode, for differences and counts"}
    options = common.options(__doc__, "fewer tokens and repetitions", matrix=matrix)
    show("compiled", **common.machine(), dtype="float32", backend="inductor")
    if options.matrix:
        matrix_main()
    else:
        time_main(32 if options.quick else 96, 2 if options.quick else 5)


if __name__ == "__main__":
    common.run(main, rank_main)
