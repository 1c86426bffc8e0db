"""What takes several GPUs: NCCL between them, how fast they talk, the planner's choices, and the gain.

The figures of a rehearsal say nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from support import checkpoints
from support.graphs import flux_prompt
from support.ranks import run_ranks
from support.server import ComfyServer

from . import modes
from .nccl_ranks import EVERY, LINK, TEAMS, groups, serve
from .section import NEEDS_SEVERAL, Section
from .server import TIMEOUT, start

PLANNED_LOSS = 1.25  # times the best choice that the planner's may take
STEPS = 6


def run(section: Section) -> None:
    """Nothing on a machine with one GPU."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        section.add("NCCL between GPUs, their speed, the gain", NEEDS_SEVERAL)
        return
    place = {"device": "cuda", "backend": "nccl"}
    with section.part("planner"):
        rates, *rows = run_ranks(LINK, ranks, "256" if section.rehearse else "1024,4608,32768", timeout=90, **place)
        section.add("rates", **rates)
        for row in rows:
            loss = row["ms"][row["chosen"]] / min(row["ms"].values())
            section.check(f"planner, {row['tokens']} tokens", section.rehearse or loss <= PLANNED_LOSS, over_best=loss, **row)
    if section.few:
        return
    with section.part("attention"):
        modes.compare(section, min(ranks, TEAMS), EVERY if section.rehearse else 1, **place)
    if ranks >= TEAMS:
        groups(section, **place)
    serve(section, ranks, {"devices": ",".join(f"cuda:{index}" for index in range(ranks))})
    hidden, double, single, side = (512, 1, 2, 256) if section.rehearse else (3072, 3, 6, 1024)
    architecture = checkpoints.Flux(hidden=hidden, double_blocks=double, single_blocks=single)
    with tempfile.TemporaryDirectory() as folder:
        large = checkpoints.Checkpoint(architecture=architecture, repeated=True)
        checkpoints.write("flux_large", Path(folder), checkpoint=large, file_stem="gain", dtype=torch.bfloat16)
        with section.part("gain"), start(section, Path(folder), "--bf16-unet") as server:
            stock, shared = (_seconds_per_step(server, side, cp) for cp in (None, {"world_size": ranks}))
            section.add(f"Flux blocks on {ranks} devices", stock_seconds=stock, seconds=shared, gain=stock / shared)


def _seconds_per_step(server: ComfyServer, side: int, cp: dict[str, int] | None) -> float:
    """The shortest step: the first ones load and warm up."""
    graph = flux_prompt(ckpt="gain", width=side, height=side, tokens=256, steps=STEPS, cp=cp)
    return min(server.step_seconds(server.run(graph, timeout=TIMEOUT).check()))
