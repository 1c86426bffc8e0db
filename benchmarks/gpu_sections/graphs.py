"""Sections that compare graphs on a real server: ranks that share the card over gloo, against the stock graph on the same card."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from support import card_cases, checkpoints, families, preloaded
from support.graphs import NodeSpec, Prompt, family_prompt, flux_prompt, wan_prompt
from support.node_graphs import completed, two_controlnets
from support.vae_graphs import vae_prompt
from torch import Tensor

from .section import Section
from .server import LARGEST, ROUNDING, Server, largest, new_models, over_stock

FAMILIES = ("qwen", "sdxl", "mochi", "hidream", "sd3", "ltxv")
PATCHED = {
    "TestOnTokens": {
        "flux": ("attention_output", "replaced_block", "forward", "injected"),
        "wan": ("mean", "queries", "decides_by_tokens", "outer_forward"),
        "qwen": ("picture", "cached_block"),
    },
    "TestUnlisted": {"sdxl": ("picture", "closures", "injected", "inner_forward", "own_model", "mixes_halves", "cached")},
}
"""Nodes that attach what no table lists, and its kinds by model: the ranks run it, on all tokens or the whole batch."""
CONTROLNETS = {"flux": "flux latent", "sdxl": "unet", "sd3": "sd3", "qwen": "qwen"}
"""Kinds of ControlNets that the ranks compute, by model."""
FP8 = {
    "Flux, weight_dtype fp8": partial(flux_prompt, weight_dtype="fp8_e4m3fn"),
    "Flux, fp8 scaled": partial(flux_prompt, ckpt="flux_fp8"),
}
"""A card computes them in half precision, or in fp8."""
AGAIN = ("Flux", "Flux, LoRA", "Wan")
"""Cases that other ways to hold weights and another precision run, too."""
VAES = (*card_cases.VAES, ("wan", "encode"))
TILED = (("taesd", "decode"), ("taesd", "encode"), ("wan", "decode"), ("kl", "decode"))
BY_ROWS = 1e-5  # of the largest value
COMPILED: dict[str, partial[Prompt]] = {
    "Flux": partial(flux_prompt),
    "Flux, fp8 scaled": FP8["Flux, fp8 scaled"],
    "Wan": partial(wan_prompt),
}
EXACT = {"Flux, fp8 scaled": "Flux"}
"""What a card computes in fp8 rounds: judged by the distance to the case in float32."""
STEPS = 6


def comfy(section: Section) -> None:
    """Families, CFG, masks, LoRA and quantised weights.

    float32: the largest difference, relative to the standard deviation of the latent. bfloat16 and quantised weights: the root mean
    square of the difference to the stock graph in float32, over that of the stock graph in the same precision.
    """
    models, cases = new_models(), card_cases.on_one_mesh()
    checkpoints.write_all([*card_cases.CHECKPOINTS, "flux_fp8"], models)
    if section.few:
        cases = dict(list(cases.items())[:2])
    else:
        with section.part("tiny models of families"):
            served = {name: entry for name, (_, entry, _) in families.served().items()}
            failed = preloaded.write_models("support.models", models / "diffusion_models", *FAMILIES).splitlines()[-1]
            if failed != "{}":
                raise RuntimeError(f"tiny models: {failed[-300:]}")
            cases |= {name: (partial(family_prompt, served[name]), {}) for name in FAMILIES}
    again = {name: cases[name] for name in AGAIN if name in cases}
    graphs = {**cases, "flux": cases["Flux"], "wan": cases.get("Wan", cases["Flux"])}
    exact = {}
    with section.part("float32"), Server(section, models, "--fp32-unet") as server:
        exact = server.compare_cases(cases, ", float32")
        for name, graph in () if section.few else FP8.items():
            server.compare_rounding(f"{name}, quantised", graph(), graph(cp=server.cp), exact["Flux"])
        if not section.few:
            _compare_patched(server, {name: graph for name, (graph, _) in graphs.items()})
    if not section.few:
        with section.part("bfloat16"), Server(section, models, "--bf16-unet") as server:
            for name in (name for name in AGAIN if name in exact):
                graph, _ = cases[name]
                server.compare_rounding(f"{name}, bfloat16", graph(), graph(cp=server.cp), exact[name])
    if not (section.few and section.rehearse):
        with section.part("without DynamicVRAM"), Server(section, models, "--fp32-unet", "--disable-dynamic-vram") as server:
            server.compare_cases(again, ", without DynamicVRAM")


def _compare_patched(server: Server, graphs: dict[str, partial[Prompt]]) -> None:
    """Nodes of packs, and two ControlNets in a chain. `graphs`: of the models, by name."""
    for patch, models in PATCHED.items():
        for model, kind in ((model, kind) for model, kinds in models.items() for kind in kinds):
            graph = partial(graphs[model], cfg=4.0, steps=4, model_nodes=[(patch, {"kind": kind})])
            server.compare(f"{model}, {patch} {kind}", graph(), graph(cp=server.cp))
    for model, kind in CONTROLNETS.items():
        case = two_controlnets(partial(graphs[model], node="CPSampler"), kind, steps=3)
        server.compare(f"{model}, two ControlNets", *(completed(case.build(cp=cp), server) for cp in (None, server.cp)))


def vae(section: Section) -> None:
    """CP VAE Decode and CP VAE Encode against the stock nodes.

    *exact*, float32: the largest difference, relative to the largest value. bfloat16: the root mean square of the difference to the
    stock result in float32, over that of the stock result in bfloat16. *tiles*: the same bits. Of a picture of Flux's full VAE,
    seconds and the device memory of a rank are noted beside the stock node's seconds.
    """
    cases, tiled = (VAES[:1], TILED[:1]) if section.few else (VAES, TILED)
    large = () if section.rehearse else ("full_flux",)
    ours, models = partial(vae_prompt, world=0, **section.ranks(2)), new_models()
    preloaded.write_models("support.vaes", models, *sorted({name for name, _ in (*cases, *tiled)}), *large)
    stock: dict[tuple[str, str], Tensor] = {}
    with section.part("float32"), Server(section, models, "--fp32-vae") as server:
        for case in cases:
            name = f"{' '.join(case)}, exact"
            with section.part(name):
                stock[case], out = (server.measured(graph)[0] for graph in (vae_prompt(*case), ours(*case, "exact")))
                difference = _of_largest_value(out, stock[case])
                section.check(name, difference <= BY_ROWS, largest=difference)
        for case in tiled:
            name = f"{' '.join(case)}, tiles"
            with section.part(name):
                out, same = (server.measured(graph)[0] for graph in (ours(*case, "tiles"), vae_prompt(*case, "tiled")))
                section.check(name, bool((out == same).all()))
        for file in large:
            with section.part(file):
                size = {"rows": 128, "columns": 128}
                for seed in (3, 4):  # the first one loads
                    expected, before = server.measured(vae_prompt(file, "decode", seed=seed, **size))
                    out, after = server.measured(ours(file, "decode", "exact", seed=seed, **size))
                difference, seconds = _of_largest_value(out, expected), {"stock_seconds": before.seconds, "seconds": after.seconds}
                memory = max(rank["memory"]["device"] for rank in server.status()["ranks"]) / 1e9
                section.check(file, difference <= BY_ROWS, largest=difference, **seconds, device_GB=memory)
    if not section.few:
        with section.part("bfloat16"), Server(section, models, "--bf16-vae") as server:
            for case, exact in stock.items():
                server.compare_rounding(f"{' '.join(case)}, bfloat16", vae_prompt(*case), ours(*case, "exact"), exact)


def _of_largest_value(out: Tensor, stock: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((out - stock).abs().max() / stock.abs().max())


def compiled(section: Section) -> None:
    """Blocks that torch compiles, against the uncompiled stock graph; then seconds per call of large Flux blocks in bfloat16.

    `largest` is in float32, relative to the standard deviation of the latent. torch compiles once more for a second size, and not
    for a third. A rehearsal compiles for Python, on CPU ranks.
    """
    compiling = ("TestPatch", {"kind": "compile_eager"}) if section.rehearse else ("TorchCompileModel", {"backend": "inductor"})
    models = new_models()
    checkpoints.write_all(["flux", "flux_fp8", "wan_t2v"], models)
    with section.part("latents"), Server(section, models, "--fp32-unet") as server:
        for name in list(COMPILED)[: 1 if section.few else None]:
            with section.part(name):
                _compare_compiled(section, server, name, compiling)
    if section.few:
        return
    side = 128 if section.rehearse else 1024
    checkpoints.write_flux("large", models, 256 if section.rehearse else 3072, 2, 2, dtype=torch.bfloat16)
    with section.part("time"), Server(section, models, "--bf16-unet") as server:
        graph = partial(flux_prompt, ckpt="large", width=side, height=side, tokens=256, steps=STEPS)
        eager, faster = (_reported(server, graph, *nodes)[1]["seconds_per_call"] for nodes in ([], [compiling]))
        section.add("Flux blocks, seconds per call", eager=eager, compiled=faster, ratio=eager / faster)


def _reported(server: Server, graph: partial[Prompt], *nodes: NodeSpec) -> tuple[Tensor, dict[str, Any]]:
    """The latent, and the report of CP Sampler."""
    latent, result = server.measured(graph(cp=server.cp, node="CPSampler", after_apply=list(nodes)))
    report: dict[str, Any] = json.loads(result.outputs["report"]["text"][0])
    return latent, report


def _compare_compiled(section: Section, server: Server, name: str, compiling: NodeSpec) -> None:
    """Sample three sizes, compiled on the ranks, then without anything of it: what a rank compiled goes with the model."""
    rounds, sizes = name in EXACT and section.device != "cpu", ({}, {"width": 96}, {"width": 128})
    outs, reports = zip(*(_reported(server, partial(COMPILED[name], **size), compiling) for size in sizes), strict=True)
    differences = []
    for size, out in zip(sizes, outs, strict=True):
        expected, _ = server.measured(COMPILED[name](**size))
        exact = server.measured(COMPILED[EXACT[name]](**size))[0] if rounds else None
        differences.append(largest(out, expected) if exact is None else over_stock(out, expected, exact))
    first, second, third = (report["compiled"] for report in reports)
    worst, more = max(differences), third["graphs"] - second["graphs"]
    good = bool(first["kinds"]) and not first["left"] and not more and worst <= (ROUNDING if rounds else LARGEST)
    figures = {"rms_over_stock" if rounds else "largest": worst, "kinds": len(first["kinds"]), "left": list(first["left"])}
    section.check(name, good, **figures, graphs_of_a_third_size=more)
