"""Forwards of ranks that share the card as CUDA graphs, on a real server, against the same graph without them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from support import checkpoints
from support.graphs import Prompt, flux_prompt
from torch import Tensor

from cp_runtime.pool.config import ONE_CARD

from .section import Section
from .server import Server, new_models

STEPS = 8
NOISE = 2.0  # times the difference of two runs without graphs


def cuda_graphs(section: Section) -> None:
    """Halves of CFG, one for each rank and without messages inside, over gloo; then Ulysses over NCCL.

    Two runs without graphs, then two with them, the second of which replays all its calls, unless one of them is measured on one
    device meanwhile and takes the memory. `largest`: difference of latents, as is
    `noise` of the two without; `seconds`: of a call, on its slowest rank. Over NCCL the ranks' messages go through sockets, so that
    times say nothing there; a small picture, as a call must take less than half a second.
    """
    halves, ulysses = {"batch_degree": 2, **section.ranks(2)}, {"ulysses_degree": 2, **section.ranks(2, "nccl")}
    replay(section, {"halves of CFG, gloo": (halves, 1, 4.0), "Ulysses, NCCL": (ulysses, 2, 1.0)})


def replay(section: Section, cases: Mapping[str, tuple[dict[str, Any], int, float]]) -> None:
    """Compare Flux blocks in bfloat16. Cases: inputs of CP Config, by what the side of the picture is divided, and CFG."""
    models, (hidden, blocks, side) = new_models(), (256, 1, 64) if section.rehearse else (3072, 2, 1024)
    checkpoints.write_flux("large", models, hidden, blocks, blocks, dtype=torch.bfloat16)
    graph = partial(flux_prompt, ckpt="large", tokens=256, steps=STEPS, node="CPSampler")
    with Server(section, models, "--bf16-unet", env={ONE_CARD: "1"}) as server:
        for name, (cp, part, cfg) in cases.items():
            with section.part(name):
                size = {"width": side // part, "height": side // part}
                _compare(section, server, name, partial(graph, **size, cfg=cfg), cp)


def _compare(section: Section, server: Server, name: str, graph: partial[Prompt], cp: dict[str, Any]) -> None:
    def run(graphs: bool) -> tuple[Tensor, dict[str, Any]]:
        latent, result = server.measured(graph(cp={**cp, "cuda_graphs": graphs}))
        report: dict[str, Any] = json.loads(result.outputs["report"]["text"][0])
        return latent, report

    (first, _), (plain, before), (recorded, during), (replayed, after) = map(run, (False, False, True, True))
    noise = (first - plain).abs().max().item()
    differs = max((out - plain).abs().max().item() for out in (recorded, replayed))
    told = after["cuda_graphs"]
    section.check(
        name,
        differs <= NOISE * noise and (section.rehearse or told["replayed"] > after["calls"] / 2),  # a CPU's calls may be too long
        largest=differs,
        noise=noise,
        replayed=[each["cuda_graphs"]["replayed"] for each in (during, after)],
        of=after["calls"],
        why=told["reason"],
        seconds_plain=_seconds(before),
        seconds_replayed=_seconds(after),
        per_call_plain=before["seconds_per_call"],
        per_call_replayed=after["seconds_per_call"],
        device_GB=[max(rank["device_memory"] for rank in each["ranks"]) / 1e9 for each in (before, after)],
    )


def _seconds(report: dict[str, Any]) -> float:
    """Of a call, on the slowest rank."""
    return max(sum(rank["seconds"].values()) for rank in report["ranks"])
