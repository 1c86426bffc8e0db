"""What takes several GPUs: NCCL between them, how fast they talk, the planner's choices, and the gain.

The figures of a rehearsal say nothing.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch
from support import checkpoints
from support.graphs import flux_prompt
from support.ranks import run_ranks
from support.server import ComfyServer

from . import modes, over_nccl
from .nccl_ranks import EVERY, LINK, TEAMS
from .options import Options
from .results import NEEDS_SEVERAL, Results
from .server import TIMEOUT, start

PLANNED_LOSS = 1.25  # times the best choice that the planner's may take
STEPS = 6


def run(options: Options, results: Results) -> None:
    """Nothing on a machine with one GPU."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        results.add("NCCL between GPUs, their speed, the gain", NEEDS_SEVERAL)
        return
    place = {"device": "cuda", "backend": "nccl"}
    with results.part("planner"):
        _planner(ranks, options, results)
    if options.few:
        return
    with results.part("attention"):
        modes.compare(min(ranks, TEAMS), results, every=EVERY if options.rehearse else 1, **place)
    if ranks >= TEAMS:
        with results.part("groups"):
            over_nccl.groups(TEAMS, results, **place)
    over_nccl.serve(ranks, {"devices": ",".join(f"cuda:{index}" for index in range(ranks))}, options, results)
    with tempfile.TemporaryDirectory() as folder:
        models, blocks = Path(folder), {"hidden": 512, "double_blocks": 1, "single_blocks": 2}
        if not options.rehearse:
            blocks = {"hidden": 3072, "double_blocks": 3, "single_blocks": 6}
        large = checkpoints.Checkpoint(architecture=checkpoints.Flux(**blocks), repeated=True)
        checkpoints.write("flux_large", models, checkpoint=large, file_stem="gain", dtype=torch.bfloat16)
        with results.part("gain"), start(options, models, "--bf16-unet") as server:
            stock, shared = (_seconds_per_step(server, options, cp) for cp in (None, {"world_size": ranks}))
            results.add(f"Flux blocks on {ranks} devices", stock_seconds=stock, seconds=shared, gain=stock / shared)


def _planner(ranks: int, options: Options, results: Results) -> None:
    lengths = "256" if options.rehearse else "1024,4608,32768"
    rates, *rows = run_ranks(LINK, ranks, lengths, timeout=90, device="cuda", backend="nccl")
    results.add("rates", **rates)
    for row in rows:
        loss = row["ms"][row["chosen"]] / min(row["ms"].values())
        results.check(f"planner, {row['tokens']} tokens", options.rehearse or loss <= PLANNED_LOSS, over_best=loss, **row)


def _seconds_per_step(server: ComfyServer, options: Options, cp: dict[str, int] | None) -> float:
    """The shortest step: the first ones load and warm up."""
    side = 256 if options.rehearse else 1024
    graph = flux_prompt(ckpt="gain", width=side, height=side, tokens=256, steps=STEPS, cp=cp)
    prompt = server.run(graph, timeout=TIMEOUT).check().prompt_id
    times = [
        event.time
        for event in server.events
        if event.type == "progress" and event.data["prompt_id"] == prompt and event.data["value"]
    ]
    return min(after - before for before, after in itertools.pairwise(times))
