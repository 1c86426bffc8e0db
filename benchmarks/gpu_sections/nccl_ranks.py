"""NCCL between ranks on one card. It refuses that on one computer; by `NCCL_HOSTID` each rank is a computer of its own to it.

Nobody promises that: the section tries it, says whether it works, and ends where it does not. What ranks send goes through sockets,
and their kernels take turns, so that times say nothing about NCCL between cards. The rest is NCCL as it is there, and `several`
runs the same over ranks that have a card each.

Latents in float32: the largest difference to the stock graph, relative to their standard deviation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import card_cases, checkpoints, preloaded
from support.package import load_package
from support.ranks import run_ranks
from support.vae_graphs import vae_prompt

from . import modes
from .faults import FAULTS, StruckServer
from .section import NEEDS_SEVERAL, Section
from .server import new_models

load_package()

from cp_runtime.pool.config import ONE_CARD

RANKS, TEAMS = 2, 4
EVERY = 13  # of the attention cases: an exchange takes some 15 ms
LINK = Path(__file__).with_name("link_ranks.py")
STRUCK = ("SIGKILL in a call", "out of device memory, until room is made", "out of device memory")


def run(section: Section) -> None:
    """Report whether it works; then on attention, groups, and a server."""
    place = {"device": section.device, "backend": "nccl"}
    try:
        rates, *_ = run_ranks(LINK, RANKS, "256", timeout=60, **place)
    except AssertionError as error:
        section.add("NCCL ranks on one card", NEEDS_SEVERAL, why=f"NCCL refuses here: {error}")
        return
    section.add("NCCL ranks on one card", **rates)
    if section.few:
        return
    with section.part("attention"):
        modes.compare(section, RANKS, EVERY, **place)
    groups(section, **place)
    serve(section, RANKS, section.ranks(RANKS, "nccl"))


def groups(section: Section, **place: str) -> None:
    """Teams, batch groups, degrees, weights and rows by turns, in every order. For `place` see `run_ranks`."""
    with section.part("groups"):
        (report,) = run_ranks(modes.ATTENTION / "group_ranks.py", TEAMS, "once", timeout=120, **place)
        wrong = [*report["wrong"], *report["disagreements"]]
        section.check(f"groups of {TEAMS} ranks", not wrong, groups=report["groups"], wrong=wrong[:3])


def serve(section: Section, ranks: int, cp: dict[str, Any]) -> None:
    """A real server whose pool has these inputs of CP Config: every way to share a call, VAEs by rows, kill, no memory, Cancel."""
    with section.part("server"):
        models = new_models()
        checkpoints.write_all(card_cases.CHECKPOINTS, models)
        preloaded.write_models("support.vaes", models, *sorted({name for name, _ in card_cases.VAES}))
        with StruckServer(section, models, "--fp32-unet", "--fp32-vae", cp=cp, env={ONE_CARD: "1"}) as server:
            server.compare_cases(card_cases.cases(ranks))
            for file, method in card_cases.VAES:
                shared = vae_prompt(file, method, "exact", world=0, **cp)
                server.compare(f"{file}, {method} by rows", vae_prompt(file, method), shared)
            backend = server.status()["backend"]
            section.check("backend", backend == "nccl", found=backend)
            for name in STRUCK:
                server.strike(name, FAULTS[name])
            server.cancel()
