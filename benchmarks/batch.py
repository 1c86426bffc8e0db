"""CFG 4: the batch axis against the sequence axis against one rank, through a real ComfyUI server, in one run.

    make bench, or COMFYUI_PATH=... python benchmarks/batch.py [--ranks 2] [--steps 4] [--rounds 3]

Both halves of CFG arrive as one call of two items. One rank is the stock graph; the others share out the items (batch axis), or
the tokens of both (sequence axis, transformers only). What the machine allows is measured with them: N stock servers, each with
one item, which have nothing to do with each other ("apart"). Rounds alternate, and seconds per step are medians over all steps
but the first of each run. One thread per rank, so that one rank has one core and N ranks have N.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import torch
from common import ROOT, note
from support import checkpoints
from support.graphs import flux_prompt, sampling_prompt
from support.server import ComfyServer


def flux(cfg: float = 4.0, **common: Any) -> dict[str, Any]:
    """1024 image tokens and 256 of text, hidden 1024."""
    return flux_prompt(ckpt="flux_bench", width=512, height=512, tokens=256, cfg=cfg, **common)


def unet(cfg: float = 4.0, **common: Any) -> dict[str, Any]:
    """SD1.5's layout, 64 to 128 channels, a latent of 64 x 64."""
    latent = {"batch": 1, "channels": 4, "frames": 0, "height": 64, "width": 64}
    return sampling_prompt(ckpt="family-unet-bench", latent=latent, conditioning={"tokens": 77, "width": 64}, cfg=cfg, **common)


MODELS = {"Flux-like": flux, "UNet-like": unet}
WAYS: dict[str, dict[str, Any]] = {"one rank": {}, "batch axis": {"batch_degree": 0}, "sequence axis": {"batch_degree": 1}}
APART = "apart"


def seconds_per_step(server: ComfyServer, prompt: dict[str, Any]) -> tuple[list[float], torch.Tensor]:
    """Seconds of every step but the first, and the latent."""
    result = server.run(prompt, timeout=600).check()
    times = [
        event.time
        for event in server.events
        if event.type == "progress" and event.data["prompt_id"] == result.prompt_id and event.data["value"] > 0
    ]
    return [after - before for before, after in itertools.pairwise(times)], server.latent(result)


def main() -> None:
    steps = {"type": int, "default": 4, "help": "sampling steps, at least 2"}
    options = common.options(__doc__, "one round", ranks=2, steps=steps, rounds=3)
    comfyui = common.comfyui()
    print(f"{common.machine()}, {options.ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="context-parallel-batch-") as folder:
        models = Path(folder) / "models"
        large = checkpoints.Checkpoint(architecture=checkpoints.Flux(hidden=1024, double_blocks=2, single_blocks=4))
        checkpoints.write("flux_large", models, checkpoint=large, file_stem="flux_bench")
        subprocess.run(
            [sys.executable, "-m", "support.models", str(models / "diffusion_models"), "unet-bench"],
            cwd=ROOT / "tests", env={**os.environ, "PYTHONPATH": str(comfyui)}, check=True, capture_output=True,
        )  # fmt: skip
        arguments = ["--use-pytorch-cross-attention"]
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(ComfyServer(comfyui, models=models, args=arguments, env={"OMP_NUM_THREADS": "1"}))
                for _ in range(options.ranks)
            ]
            for name, make in MODELS.items():
                measure(servers, name, make, options)


def seconds_apart(servers: Sequence[ComfyServer], prompt: dict[str, Any]) -> list[float]:
    """Seconds of every step but the first, of the slowest server, when all run the same prompt at the same time."""
    with ThreadPoolExecutor(len(servers)) as threads:
        runs = [seconds for seconds, _ in threads.map(lambda server: seconds_per_step(server, prompt), servers)]
    return [max(step) for step in zip(*runs, strict=True)]


def measure(servers: Sequence[ComfyServer], name: str, make: Any, options: argparse.Namespace) -> None:
    """Run all ways in turn, print one line each."""
    server = servers[0]
    ways = {way: cp for way, cp in WAYS.items() if way != "sequence axis" or make is not unet}
    times: dict[str, list[float]] = {way: [] for way in (*ways, APART)}
    latents: dict[str, torch.Tensor] = {}
    for _ in range(1 if options.quick else options.rounds):
        for way, cp in ways.items():
            settings = None if way == "one rank" else {"world_size": options.ranks, **cp}
            seconds, latents[way] = seconds_per_step(server, make(steps=options.steps, cp=settings))
            times[way] += seconds
            time.sleep(0.5)
        times[APART] += seconds_apart(servers, make(cfg=1.0, steps=options.steps))
        time.sleep(0.5)
    print(f"\n{name}, CFG 4")
    one, apart = statistics.median(times["one rank"]), statistics.median(times[APART])
    for way, seconds in times.items():
        median = statistics.median(seconds)
        if way in ways and way != "one rank":
            note(f"batch, {name}, {way}, speed-up", one / median)
        line = f"  {way:14} {median:7.3f} s per step  {one / median:5.2f} x one rank  {apart / median:5.2f} x apart"
        if way in latents:
            difference = (latents[way] - latents["one rank"]).abs().max() / latents["one rank"].std()
            line += f"  difference {difference:.0e} std"
        print(line)


if __name__ == "__main__":
    main()
