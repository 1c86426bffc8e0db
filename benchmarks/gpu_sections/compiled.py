"""Blocks that torch compiles, on a real server: ranks that share the card over gloo, against the stock graph, uncompiled.

`largest` is in float32, relative to the standard deviation of the latent; another size must compile nothing. Then seconds per call
of large Flux blocks in bfloat16, as they are and compiled. A rehearsal compiles for Python, on CPU ranks.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from support import checkpoints
from support.graphs import NodeSpec, Prompt, flux_prompt, wan_prompt
from torch import Tensor

from .section import Section
from .server import LARGEST, ROUNDING, Server, largest, new_models, over_stock

STEPS = 6
CASES: dict[str, partial[Prompt]] = {
    "Flux": partial(flux_prompt),
    "Flux, fp8 scaled": partial(flux_prompt, ckpt="flux_fp8"),
    "Wan": partial(wan_prompt),
}
QUANTISED = {"Flux, fp8 scaled": "Flux"}
"""What a card computes in fp8 rounds: judged by the distance to the case in float32."""


def run(section: Section) -> None:
    """Report on every case, and on time."""
    compiling = ("TestPatch", {"kind": "compile_eager"}) if section.rehearse else ("TorchCompileModel", {"backend": "inductor"})
    models = new_models()
    checkpoints.write_all(["flux", "flux_fp8", "wan_t2v"], models)
    with section.part("latents"), Server(section, models, "--fp32-unet") as server:
        for name in list(CASES)[: 1 if section.few else None]:
            with section.part(name):
                _compare(section, server, name, compiling)
    if section.few:
        return
    side = 128 if section.rehearse else 1024
    checkpoints.write_flux("large", models, 256 if section.rehearse else 3072, 2, 2, dtype=torch.bfloat16)
    with section.part("time"), Server(section, models, "--bf16-unet") as server:
        graph = partial(flux_prompt, ckpt="large", width=side, height=side, tokens=256, steps=STEPS)
        eager, compiled = (_ours(server, graph, *nodes)[1]["seconds_per_call"] for nodes in ([], [compiling]))
        section.add("Flux blocks, seconds per call", eager=eager, compiled=compiled, ratio=eager / compiled)


def _ours(server: Server, graph: partial[Prompt], *nodes: NodeSpec) -> tuple[Tensor, dict[str, Any]]:
    """The latent, and the report of CP Sampler."""
    latent, result = server.measured(graph(cp=server.cp, node="CPSampler", after_apply=list(nodes)))
    report: dict[str, Any] = json.loads(result.outputs["report"]["text"][0])
    return latent, report


def _compare(section: Section, server: Server, name: str, compiling: NodeSpec) -> None:
    """Sample two sizes, compiled on the ranks, then without anything of it: what a rank compiled goes with the model."""
    rounds, sizes = name in QUANTISED and section.device != "cpu", ({}, {"width": 96})
    outs, reports = zip(*(_ours(server, partial(CASES[name], **size), compiling) for size in sizes), strict=True)
    differences = []
    for size, out in zip(sizes, outs, strict=True):
        expected, _ = server.measured(CASES[name](**size))
        exact = server.measured(CASES[QUANTISED[name]](**size))[0] if rounds else None
        differences.append(largest(out, expected) if exact is None else over_stock(out, expected, exact))
    first, later = (report["compiled"] for report in reports)
    worst = max(differences)
    more = later["graphs"] - first["graphs"]
    good = bool(first["kinds"]) and not first["left"] and not more and worst <= (ROUNDING if rounds else LARGEST)
    figures = {"rms_over_stock" if rounds else "largest": worst, "kinds": len(first["kinds"]), "left": list(first["left"])}
    section.check(name, good, **figures, graphs_of_another_size=more)
