"""Sections about ranks that exchange tokens: over gloo and NCCL on one card, and between several.

All run the rank scripts of tests/ranks. `largest` is the difference of float32 from one process; `half rms` is the error of half
precision over all cases, relative to that of one process. Latents of a server in float32: the largest difference to the stock
graph, relative to their standard deviation.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import card_cases, checkpoints, families, preloaded
from support.graphs import family_prompt
from support.package import ROOT
from support.ranks import run_ranks
from support.vae_graphs import vae_prompt

from cp_runtime.pool.config import ONE_CARD

from .faults import FAULTS, StruckServer
from .section import NEEDS_SEVERAL, Section
from .server import new_models

ATTENTION = ROOT / "tests" / "ranks" / "attention"
LINK = Path(__file__).with_name("link_ranks.py")
HEAD_DIM = 128
LARGEST, HALF = 2e-5, 1.2
PAIR, TEAMS = 2, 4  # ranks
EVERY = 13  # of the attention cases, where an exchange takes long: some 15 ms over NCCL on one card
STRUCK = ("SIGKILL in a call", "out of device memory, until room is made", "out of device memory")
NCCL_REFUSES = re.compile(r"Duplicate GPU detected|ncclInvalidUsage")
SHARED_IS_FASTER = "exchanges through shared memory are"  # `WorkerPool.chosen`
PLANNED_LOSS = 1.25  # times the best choice that the planner's may take


def modes(section: Section) -> None:
    """The matrix of attention cases on ranks that share the device over gloo, with heads of 128."""
    for world in (2,) if section.few else (2, 3):
        compare(section, world, EVERY if section.few and section.rehearse else 1, device=section.device)


def nccl_ranks(section: Section) -> None:
    """NCCL between ranks on one card. It refuses that on one computer; by `NCCL_HOSTID` each rank is a computer of its own to it.

    Nobody promises that: the section tries it, says whether it works, and ends where it does not. What ranks send goes through
    sockets, and their kernels take turns, so that times say nothing about NCCL between cards. The rest is NCCL as it is there.
    """
    place = {"device": section.device, "backend": "nccl"}
    try:
        rates, *_ = run_ranks(LINK, PAIR, "256", timeout=60, **place)
    except AssertionError as error:  # with what the ranks wrote
        if not NCCL_REFUSES.search(str(error)):
            raise
        section.add("NCCL ranks on one card", NEEDS_SEVERAL, why=f"NCCL refuses here: {error}")
        return
    section.add("NCCL ranks on one card", **rates)
    if not section.few:
        compare(section, PAIR, EVERY, **place)
        groups(section, **place)
        serve(section, PAIR, section.ranks(PAIR, "nccl"))


def several(section: Section) -> None:
    """NCCL between GPUs, how fast they talk, and the planner's choices. The figures of a rehearsal say nothing."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        section.add("NCCL between GPUs, their speed", NEEDS_SEVERAL)
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
    compare(section, min(ranks, TEAMS), EVERY if section.rehearse else 1, **place)
    if ranks >= TEAMS:
        groups(section, **place)
    serve(section, ranks, {"devices": ",".join(f"cuda:{index}" for index in range(ranks))})


def compare(section: Section, world: int, every: int, **place: str) -> None:
    """A result per mode.

    Args:
        every: leave out all but every how many-th case.
        place: device and backend, see `run_ranks`.
    """
    with section.part(f"attention on {world} ranks"):
        reports = run_ranks(ATTENTION / "attention_ranks.py", world, str(HEAD_DIM), str(every), **place)
        by_mode: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for report in reports:
            by_mode[report["mode"]].append(report)
        for mode, cases in by_mode.items():
            largest = max(case["difference"] for case in cases if case["dtype"] == "float32")
            halves = [case for case in cases if case["dtype"] != "float32"]
            half = math.sqrt(sum(case["rms"] ** 2 for case in halves) / sum(case["one_process_rms"] ** 2 for case in halves))
            good = largest <= LARGEST and half <= HALF and all(case["finite"] for case in cases)
            section.check(f"{world} ranks, {mode}", good, cases=len(cases), largest=largest, half_rms=half)


def groups(section: Section, **place: str) -> None:
    """Teams, batch groups, degrees, weights and rows by turns, in every order. For `place` see `run_ranks`."""
    with section.part("groups"):
        (report,) = run_ranks(ATTENTION / "group_ranks.py", TEAMS, "once", timeout=120, **place)
        wrong = [*report["wrong"], *report["disagreements"]]
        section.check(f"groups of {TEAMS} ranks", not wrong, groups=report["groups"], wrong=wrong[:3])


def serve(section: Section, ranks: int, cp: dict[str, Any]) -> None:
    """A real server whose pool has these inputs of CP Config: every way to share a call, VAEs by rows, kill, no memory, Cancel."""
    with section.part("server"):
        models = new_models()
        checkpoints.write_all(card_cases.CHECKPOINTS, models)
        preloaded.write_models("support.models", models / "diffusion_models", "wan_vace")
        preloaded.write_models("support.vaes", models, *sorted({name for name, _ in card_cases.VAES}))
        with StruckServer(section, models, "--fp32-unet", "--fp32-vae", cp=cp, env={ONE_CARD: "1"}) as server:
            # Blocks beside blocks: of all families this one sends most beside the usual order.
            vace = partial(family_prompt, families.served()["wan_vace"][1], cfg=4.0)
            staged = {"weights": "staged", "world_size": ranks}
            server.compare_cases({**card_cases.cases(ranks), "VACE, stages": (vace, staged)})
            for file, method in card_cases.VAES:
                shared = vae_prompt(file, method, "exact", world=0, **cp)
                server.compare(f"{file}, {method} by rows", vae_prompt(file, method), shared)
            found = server.status()
            # Where cards do not reach each other's memory, ranks compare NCCL with shared memory, and take the faster.
            chosen = found["backend"] == "nccl" or SHARED_IS_FASTER in found["fallback"]
            section.check("backend", chosen, found=found["backend"], why=found["fallback"])
            for name in STRUCK:
                server.strike(name, FAULTS[name])
            server.cancel()
