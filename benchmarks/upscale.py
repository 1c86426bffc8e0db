"""CP Upscale Image on two CPU ranks against Upscale Image (using Model) in one process: seconds, and how many times as fast.

    make bench, or COMFYUI_PATH=... python benchmarks/upscale.py [--quick] [--models compact esrgan] [--repeat 2]

A ComfyUI server with one thread per process, models of published width with random weights, in float32: Compact (SRVGGNet, 64
channels, 16 convolutions) for a picture of 992 x 992 and for 4 frames of 480 x 480, and ESRGAN (23 blocks) for 4 frames of 64 x 64.
The stock node and ours run in turn, each as a prompt of its own, with transfers, without loading. *Ranks ratio* is the same for
processor seconds of the rank that needs most, which other programs on the machine disturb less, and *CPU ratio* for these and those
of ComfyUI's process, which blends, together: as if it did so while the ranks wait.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import common
import psutil
from common import show
from support import preloaded
from support.graphs import Prompt
from support.server import ComfyServer
from support.upscalers import upscale_prompt

RANKS = 2
TARGET = 1.9
SIZES = {
    "wide_compact": ((992, 992, 1), (480, 480, 4)),
    "wide_esrgan": ((64, 64, 4),),
}
"""Columns, rows and frames, by model."""


def main() -> None:
    options = common.options(
        __doc__,
        "a picture of a quarter of the rows, and two frames",
        models={"nargs": "+", "choices": SIZES, "default": list(SIZES)},
        repeat=2,
    )
    comfyui = common.comfyui()
    with common.models() as models:
        preloaded.write_models("support.upscalers", models, *options.models)
        with ComfyServer(comfyui, models=models, env={"OMP_NUM_THREADS": "1"}) as server:
            show("upscale", **common.machine(), ranks=RANKS, threads_per_process=1, dtype="float32")
            for name in options.models:
                for width, height, frames in SIZES[name]:
                    size = {"width": width, "height": height, "frames": frames}
                    if options.quick:
                        size = size | ({"height": height // 4} if frames == 1 else {"frames": 2})
                    compare(
                        server,
                        f"{name}, {' × '.join(map(str, size.values()))}",
                        partial(upscale_prompt, name, **size),
                        options.repeat,
                    )


def compare(server: ComfyServer, name: str, graph: partial[Prompt], repeat: int) -> None:
    """Time the stock node and ours in turn, and show a line."""
    seeds = itertools.count()  # another picture in every prompt
    for world in (None, RANKS):
        seconds(server, graph(world, width=32, height=32, frames=2, seed=next(seeds)))  # loads
    runs = [[seconds(server, graph(world, seed=next(seeds))) for world in (None, RANKS)] for _ in range(repeat)]
    (stock, alone, _), (ours, first, rank) = (map(statistics.median, zip(*each, strict=True)) for each in zip(*runs, strict=True))
    cpu = {"CPU s stock": alone, "CPU s ComfyUI": first, "CPU s rank": rank}
    ratios = {"ranks ratio": alone / rank, "CPU ratio": alone / (first + rank), "times as fast on two ranks": stock / ours}
    show(name, ratios, s_stock=stock, s_ranks=ours, target=TARGET, **cpu)


def seconds(server: ComfyServer, prompt: Prompt) -> tuple[float, float, float]:
    """Seconds of the prompt, processor seconds of ComfyUI's process and of the busiest rank; without loading and saving."""
    crop = {"image": ["run", 0], "width": 8, "height": 8, "x": 0, "y": 0}
    prompt |= {"cut": {"class_type": "ImageCrop", "inputs": crop}}
    prompt["kept"]["inputs"]["image"] = ["cut", 0]
    everyone = [psutil.Process(server.pid), *server.workers()]
    before = [process.cpu_times() for process in everyone]
    wall = server.run(prompt, timeout=7200).check().seconds
    worked = [process.cpu_times() for process in everyone]
    first, *others = (now.user + now.system - was.user - was.system for now, was in zip(worked, before, strict=True))
    return wall, first, max(others, default=0.0)


if __name__ == "__main__":
    main()
