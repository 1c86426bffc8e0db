"""Blocks that torch compiles, on a real server: ranks that share the card over gloo, against the stock graph, uncompiled.

`largest` is in float32, relative to the standard deviation of the latent; another size must compile nothing. Then seconds per call
of large Flux blocks in bfloat16, as they are and compiled. A rehearsal compiles for Python, on CPU ranks.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import checkpoints
from support.graphs import NodeSpec, Prompt, flux_prompt, wan_prompt
from support.server import ComfyServer
from torch import Tensor

from .options import Options
from .results import Results
from .server import LARGEST, ROUNDING, largest, over_stock, sample, start

RANKS, STEPS = 2, 6
CASES: dict[str, partial[Prompt]] = {
    "Flux": partial(flux_prompt),
    "Flux, fp8 scaled": partial(flux_prompt, ckpt="flux_fp8"),
    "Wan": partial(wan_prompt),
}
QUANTISED = {"Flux, fp8 scaled": "Flux"}
"""What a card computes in fp8 rounds: judged by the distance to the case in float32."""


def run(options: Options, results: Results) -> None:
    """A result per case, and one for time."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        checkpoints.write_all(["flux", "flux_fp8", "wan_t2v"], models)
        cases = dict(list(CASES.items())[:1]) if options.few else CASES
        with results.part("latents"), start(options, models, "--fp32-unet") as server:
            for name, graph in cases.items():
                with results.part(name):
                    _compare(server, name, graph, options, results)
        if options.few:
            return
        blocks = {"hidden": 256 if options.rehearse else 3072, "double_blocks": 2, "single_blocks": 2}
        large = checkpoints.Checkpoint(architecture=checkpoints.Flux(**blocks), repeated=True)
        checkpoints.write("flux_large", models, checkpoint=large, file_stem="large", dtype=torch.bfloat16)
        with results.part("time"), start(options, models, "--bf16-unet") as server:
            side = 128 if options.rehearse else 1024
            graph = partial(flux_prompt, ckpt="large", width=side, height=side, tokens=256, steps=STEPS)
            eager, compiled = (
                _sample(server, graph, options, nodes)[1]["seconds_per_call"] for nodes in ([], [_compile_node(options)])
            )
            results.add("Flux blocks, seconds per call", eager=eager, compiled=compiled, ratio=eager / compiled)


def _compile_node(options: Options) -> NodeSpec:
    if options.rehearse:
        return "TestPatch", {"kind": "compile_eager"}
    return "TorchCompileModel", {"backend": "inductor"}


def _sample(server: ComfyServer, graph: partial[Prompt], options: Options, nodes: list[NodeSpec]) -> tuple[Tensor, dict[str, Any]]:
    """The latent, and the report of CP Sampler."""
    config = {"devices": options.devices(RANKS), "backend": "gloo"}
    latent, result = sample(server, graph(cp=config, node="CPSampler", after_apply=nodes))
    report: dict[str, Any] = json.loads(result.outputs["report"]["text"][0])
    return latent, report


def _compare(server: ComfyServer, name: str, graph: partial[Prompt], options: Options, results: Results) -> None:
    expected, _ = sample(server, graph())
    out, report = _sample(server, graph, options, [_compile_node(options)])
    other = partial(graph, width=96)
    again, later = _sample(server, other, options, [_compile_node(options)])
    compiled, more = report["compiled"], later["compiled"]["graphs"] - report["compiled"]["graphs"]
    good = bool(compiled["kinds"]) and not compiled["left"] and not more
    pairs = ((out, expected, {}), (again, sample(server, other())[0], {"width": 96}))
    if name in QUANTISED and options.device != "cpu":
        exact = CASES[QUANTISED[name]]
        figures = {"rms_over_stock": max(over_stock(*pair, sample(server, exact(**size))[0]) for *pair, size in pairs)}
        good = good and figures["rms_over_stock"] <= ROUNDING
    else:
        figures = {"largest": max(largest(*pair) for *pair, _ in pairs)}
        good = good and figures["largest"] <= LARGEST
    results.check(name, good, **figures, kinds=len(compiled["kinds"]), left=list(compiled["left"]), graphs_of_another_size=more)
