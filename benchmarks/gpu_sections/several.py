"""What takes several GPUs: NCCL between them, how fast they talk, the planner's choices, and the gain.

The figures of a rehearsal say nothing.
"""

from __future__ import annotations

import torch
from support import checkpoints
from support.graphs import flux_prompt
from support.ranks import run_ranks

from . import modes
from .nccl_ranks import EVERY, LINK, TEAMS, groups, serve
from .section import NEEDS_SEVERAL, Section
from .server import TIMEOUT, Server, new_models

PLANNED_LOSS = 1.25  # times the best choice that the planner's may take
STEPS = 6


def run(section: Section) -> None:
    """Report nothing on a machine with one GPU."""
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
    models, (hidden, double, single, side) = new_models(), (512, 1, 2, 256) if section.rehearse else (3072, 3, 6, 1024)
    checkpoints.write_flux("gain", models, hidden, double, single, dtype=torch.bfloat16)
    with section.part("gain"), Server(section, models, "--bf16-unet") as server:

        def seconds(cp: dict[str, int] | None) -> float:
            """The shortest step: the first ones load and warm up."""
            graph = flux_prompt(ckpt="gain", width=side, height=side, tokens=256, steps=STEPS, cp=cp)
            return min(server.step_seconds(server.run(graph, timeout=TIMEOUT).check()))

        stock, shared = seconds(None), seconds({"world_size": ranks})
        section.add(f"Flux blocks on {ranks} devices", stock_seconds=stock, seconds=shared, gain=stock / shared)
