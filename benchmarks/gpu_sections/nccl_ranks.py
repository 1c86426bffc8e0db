"""NCCL between ranks on one card. It refuses that on one computer; by `NCCL_HOSTID` each rank is a computer of its own to it.

Nobody promises that: the section tries it, says whether it works, and ends where it does not. What ranks send goes through sockets,
and their kernels take turns, so that times say nothing about NCCL between cards. The rest is NCCL as it is there.
"""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_ranks

from . import modes, over_nccl
from .options import Options
from .results import NEEDS_SEVERAL, Results

RANKS, TEAMS = 2, 4
EVERY = 13  # of the attention cases: an exchange takes some 15 ms
LINK = Path(__file__).with_name("link_ranks.py")


def run(options: Options, results: Results) -> None:
    """Whether it works; then attention, groups, and a server."""
    place = {"device": options.device, "backend": "nccl"}
    try:
        rates, *_ = run_ranks(LINK, RANKS, "256", timeout=60, **place)
    except AssertionError as error:
        results.add("NCCL ranks on one card", NEEDS_SEVERAL, why=f"NCCL refuses here: {error}")
        return
    results.add("NCCL ranks on one card", **rates)
    if options.few:
        return
    with results.part("attention"):
        modes.compare(RANKS, results, every=EVERY, **place)
    with results.part("groups"):
        over_nccl.groups(TEAMS, results, **place)
    over_nccl.serve(RANKS, {"devices": options.devices(RANKS), "backend": "nccl"}, options, results)
