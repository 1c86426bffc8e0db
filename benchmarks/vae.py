"""CP VAE Decode on two CPU ranks against VAE Decode in one process: seconds, and how many times as fast.

    make bench, or COMFYUI_PATH=... python benchmarks/vae.py [--quick] [--full] [--only exact tiles] [--vaes flux wan] [--repeat 1]

A ComfyUI server with one thread per process, VAEs of full width with random weights, in float32: Flux's for a picture of 512 x 512,
Wan 2.1's for 9 frames of 416 x 240; with `--full` pictures and tiles of twice the side, for an hour. The stock node and ours run in
turn, each as a prompt of its own: with transfers between processes, and without loading. *exact* is compared with VAE Decode,
*tiles* with VAE Decode (Tiled) of the same settings. *CPU ratio* is the same for processor seconds of the rank that needs most,
which other programs on the machine disturb less.
"""

from __future__ import annotations

import statistics
from functools import partial

import common
import psutil
from common import show
from support import preloaded
from support.graphs import Prompt
from support.server import ComfyServer
from support.vae_graphs import vae_prompt

RANKS = 2
TARGET = 1.8
SIZES = {"flux": (64, 64), "wan": (30, 52)}
"""Rows and columns of the latent; of Wan's, 3 frames."""
STOCK = {"exact": None, "tiles": "tiled"}
TILES = {"tile_size": 256, "overlap": 32}


def main() -> None:
    options = common.options(
        __doc__,
        "pictures of half the side",
        full={"default": False, "help": "of twice the side"},
        only={"nargs": "+", "choices": STOCK, "default": list(STOCK)},
        vaes={"nargs": "+", "choices": SIZES, "default": list(SIZES)},
        repeat=1,
    )
    comfyui, times = common.comfyui(), 2 if options.full else 1
    tiles = {**{name: times * value for name, value in TILES.items()}, "temporal_size": 64, "temporal_overlap": 8}
    with common.models() as models:
        preloaded.write_models("support.vaes", models, *(f"full_{name}" for name in options.vaes))
        with ComfyServer(comfyui, models=models, env={"OMP_NUM_THREADS": "1"}) as server:
            show("vae", **common.machine(), ranks=RANKS, threads_per_process=1, dtype="float32")
            for name in options.vaes:
                rows, columns = (times * size // (2 if options.quick else 1) for size in SIZES[name])
                graph = partial(vae_prompt, f"full_{name}", "decode", world=RANKS, tiles=tiles, again=True, step_timeout=3600.0)
                for mode in options.only:
                    compare(server, f"{name}, {mode}", partial(graph, rows=rows, columns=columns), mode, options.repeat)


def compare(server: ComfyServer, name: str, graph: partial[Prompt], mode: str, repeat: int) -> None:
    """Time the stock node and ours in turn, and show a line."""
    kinds = (STOCK[mode], mode)
    for kind in kinds:
        seconds(server, graph(mode=kind, rows=8, columns=8))  # loads
    runs = [[seconds(server, graph(mode=kind)) for kind in kinds] for _ in range(repeat)]
    (stock, stock_cpu), (ours, our_cpu) = (map(statistics.median, zip(*each, strict=True)) for each in zip(*runs, strict=True))
    target = {"target": TARGET} if mode == "exact" else {}
    ratios = {"times as fast on two ranks": stock / ours}
    cpu = {"CPU s stock": stock_cpu, "CPU s rank": our_cpu, "CPU ratio": stock_cpu / our_cpu}
    show(name, ratios, s_stock=stock, s_ranks=ours, **target, **cpu)


def seconds(server: ComfyServer, prompt: Prompt) -> tuple[float, float]:
    """Seconds of the prompt, and processor seconds of the process that worked most; without loading."""
    everyone = [psutil.Process(server.pid), *server.workers()]
    before = [process.cpu_times() for process in everyone]
    wall = server.run(prompt, timeout=7200).check().seconds
    worked = [process.cpu_times() for process in everyone]
    return wall, max(now.user + now.system - was.user - was.system for now, was in zip(worked, before, strict=True))


if __name__ == "__main__":
    main()
