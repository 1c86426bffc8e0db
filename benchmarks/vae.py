"""CP VAE Decode on two CPU ranks against VAE Decode in one process: seconds, and how many times as fast.

    make bench, or COMFYUI_PATH=... python benchmarks/vae.py [--quick] [--full] [--only exact tiles] [--vaes flux wan] [--repeat 1]

A ComfyUI server with one thread per process, VAEs of full width with random weights, in float32: Flux's for a picture of 512 x 512,
Wan 2.1's for 9 frames of 416 x 240; with `--full` pictures and tiles of twice the side, for an hour. The stock node and ours run in
turn, each as a prompt of its own: with transfers between processes, and without loading. *exact* is compared with VAE Decode,
*tiles* with VAE Decode (Tiled) of the same settings. The last column is the same for processor seconds of the rank that needs most,
which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import common
import psutil
from common import note
from support import preloaded
from support.server import ComfyServer
from support.vae_graphs import vae_prompt

RANKS = 2
TARGET = 1.8
SIZES = {"flux": (64, 64), "wan": (30, 52)}
"""Rows and columns of the latent; of Wan's, 3 frames."""
STOCK = {"exact": None, "tiles": "tiled"}
TILES = {"tile_size": 256, "overlap": 32}


def main() -> None:
    arguments = common.options(
        __doc__,
        "pictures of half the side",
        full={"action": "store_true", "help": "of twice the side"},
        only={"nargs": "+", "choices": STOCK, "default": list(STOCK)},
        vaes={"nargs": "+", "choices": SIZES, "default": list(SIZES)},
        repeat=1,
    )
    comfyui = common.comfyui()
    with tempfile.TemporaryDirectory() as folder:
        written = [sys.executable, "-m", "support.vaes", folder, *(f"full_{name}" for name in arguments.vaes)]
        done = preloaded.run(written[1:], cwd=common.ROOT / "tests", env={**os.environ, "PYTHONPATH": str(comfyui)})
        if done.returncode:
            sys.exit(done.stderr)
        with ComfyServer(comfyui, models=Path(folder), env={"OMP_NUM_THREADS": "1"}) as server:
            print(f"{os.cpu_count()} cores, {RANKS} ranks, a thread each, float32")
            print("VAE    mode     s stock   s ranks    times as fast       CPU s stock  CPU s rank    ratio")
            for name in arguments.vaes:
                for mode in arguments.only:
                    compare(server, name, mode, arguments)


def compare(server: ComfyServer, name: str, mode: str, arguments: argparse.Namespace) -> None:
    """Time the stock node and ours in turn, and print a line."""
    times_the_side = 2 if arguments.full else 1
    tiles = {**{key: times_the_side * value for key, value in TILES.items()}, "temporal_size": 64, "temporal_overlap": 8}
    rows, columns = (times_the_side * size // (2 if arguments.quick else 1) for size in SIZES[name])
    for kind in (STOCK[mode], mode):
        seconds(server, name, kind, 8, 8, tiles)  # loads
    times: dict[str, list[tuple[float, float]]] = {"stock": [], "ranks": []}
    for _ in range(arguments.repeat):
        times["stock"].append(seconds(server, name, STOCK[mode], rows, columns, tiles))
        times["ranks"].append(seconds(server, name, mode, rows, columns, tiles))
    (stock, stock_cpu), (ours, our_cpu) = (map(statistics.median, zip(*each, strict=True)) for each in times.values())
    note(f"vae, {name}, {mode}, times as fast on two ranks", stock / ours)
    target = f"target {TARGET}" if mode == "exact" else ""
    print(
        f"{name:6} {mode:6} {stock:9.2f} {ours:9.2f}    {stock / ours:.2f} {target:12}  {stock_cpu:13.2f} {our_cpu:11.2f} "
        f"{stock_cpu / our_cpu:8.2f}",
        flush=True,
    )


def seconds(
    server: ComfyServer, name: str, mode: str | None, rows: int, columns: int, tiles: dict[str, int]
) -> tuple[float, float]:
    """Seconds of the prompt, and processor seconds of the process that worked most; without loading."""
    everyone = [psutil.Process(server.pid), *server.workers()]
    before = [process.cpu_times() for process in everyone]
    prompt = vae_prompt(
        f"full_{name}", "decode", mode, world=RANKS, rows=rows, columns=columns, tiles=tiles, again=True, step_timeout=3600.0
    )
    wall = server.run(prompt, timeout=7200).check().seconds
    worked = [process.cpu_times() for process in everyone]
    return wall, max(now.user + now.system - was.user - was.system for now, was in zip(worked, before, strict=True))


if __name__ == "__main__":
    main()
