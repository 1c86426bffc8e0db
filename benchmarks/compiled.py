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
from pathlib import Path
from typing import Any

import common
import torch
from common import ROOT, note
from support.ranks import COMFY, finish, report, run_ranks, start, use_comfyui

sys.path.insert(0, str(ROOT / "tests" / "ranks" / "families"))
CASES = (
    ("flux", "flux"), ("wan", "wan t2v"), ("qwen_image", "qwen text mask"), ("sd3", "sd3.5 medium"), ("lumina", "z-image"),
    ("ltxv", "ltxv"),
)  # fmt: skip
# ring degree, Ulysses degree, rotate method, batch degree
MODES = ((1, 2, "allgather", 1), (2, 1, "alltoall", 1), (2, 1, "allgather", 1), (1, 3, "allgather", 1), (3, 1, "alltoall", 1))
SIZE = dict(hidden_size=768, num_heads=6, depth=2, depth_single_blocks=2, mlp_ratio=4.0, axes_dim=[32, 48, 48])


def rank_main() -> None:
    _, world, (side, repetitions) = start()
    use_comfyui()

    import torch.distributed as dist
    from support.families.flux import MODELS, flux
    from support.models import build

    from cp_runtime.comfy.forward.rank_sharded import run_sharded
    from cp_runtime.comfy.forward.ui_interception import innermost_method
    from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
    from cp_runtime.engine.config import ContextParallelConfig
    from cp_runtime.engine.hooks import InstalledPlan
    from cp_runtime.engine.mesh import BatchMesh
    from cp_runtime.families import plan_for

    spec = MODELS["flux"]
    model = build(replace(spec, arguments={**spec.arguments, **SIZE}))
    inputs = flux(height=int(side), width=int(side), text=64)
    installed, mesh = InstalledPlan(model, plan_for(model)), BatchMesh(dist.group.WORLD).sequence()
    config = ContextParallelConfig(ulysses_degree=world)

    def call(compiled: bool) -> tuple[torch.Tensor, float]:
        blocks = CompiledBlocks(model, installed.plan, CompileSettings()) if compiled else None
        dist.barrier()
        began = time.perf_counter()
        arguments = {name: value.clone() for name, value in inputs.items()}
        out, _ = run_sharded(installed, getattr(model, innermost_method(model)), arguments, mesh, lambda shape: config)
        dist.barrier()
        seconds = time.perf_counter() - began
        if blocks is not None:
            blocks.remove()
        return out, seconds

    with torch.inference_mode():
        expected, _ = call(False)
        out, first = call(True)
        difference = ((out - expected).abs().max() / expected.std()).item()
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * int(repetitions)):
            times[number % 2 == 1].append(call(number % 2 == 1)[1])
    eager, compiled = (sorted(times[which])[len(times[which]) // 2] for which in (False, True))
    report(eager=eager, compiled=compiled, first=first, difference=difference)
    finish()


def time_main(side: int, repetitions: int) -> None:
    print(f"{common.machine()}, float32, inductor")
    print("ranks   s eager  compiled  ratio | first compiled call: s first  cached | largest difference")
    rows: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
            # Else inductor tries every set of instructions of the processor with a program: half a minute. On a GPU it does not.
            os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
            runs = [run_ranks(Path(__file__), ranks, str(side), str(count), timeout=1200)[0] for count in (repetitions, 1)]
        row = rows[ranks] = runs[0]
        ratio = row["eager"] / row["compiled"]
        note(f"compiled, {ranks} ranks, eager / compiled", ratio)
        print(
            f"{ranks:5} {row['eager']:9.3f} {row['compiled']:9.3f} {ratio:6.3f} | {row['first']:29.1f} {runs[1]['first']:7.1f} | "
            f"{row['difference']:.1e}",
            flush=True,
        )
    for name in ("eager", "compiled"):
        ratio = rows[1][name] / rows[2][name]
        note(f"compiled, {name} blocks, 1 rank / 2 ranks", ratio)
        print(f"{name}: 1 rank / 2 ranks {ratio:.3f}")


def matrix_main() -> None:
    for mode in MODES:
        script = ROOT / "tests" / "ranks" / "families" / "compiled_ranks.py"
        arguments = (*map(str, mode), "inductor", json.dumps(CASES))
        families = sorted({family for family, _ in CASES})
        rows = run_ranks(
            script, mode[0] * mode[1] * mode[3], *arguments, timeout=3600, preload=(*COMFY, "family_stock"), prepare=families
        )
        for row in (row for row in rows if row["case"] != "removed"):
            worst = max(row["differences"].values())
            print(
                f"ring {mode[0]} ({mode[2]}), ulysses {mode[1]}: {row['case']:16} difference {worst:.1e}, graphs {row['graphs']}, "
                f"breaks {row['breaks']}, {row['seconds']:.1f} s",
                *row["failures"],
                sep="\n    ",
                flush=True,
            )


def main() -> None:
    matrix = {"action": "store_true", "help": "every family and mode, for differences and counts"}
    options = common.options(__doc__, "fewer tokens and repetitions", matrix=matrix)
    if options.matrix:
        matrix_main()
    else:
        time_main(32 if options.quick else 96, 2 if options.quick else 5)


if __name__ == "__main__":
    common.run(main, rank_main)
