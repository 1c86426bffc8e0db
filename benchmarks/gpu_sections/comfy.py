"""Real server, real queue: ranks that share the card over gloo, against the stock graph on the same card.

float32: the largest difference, relative to the standard deviation of the latent. bfloat16 and quantised weights: the root mean
square of the difference to the stock graph in float32, over that of the stock graph in the same precision.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from support import checkpoints, families
from support.graphs import Prompt, family_prompt, flux_prompt, wan_prompt
from support.server import ComfyServer
from torch import Tensor

from .section import Section
from .server import compare, compare_rounding, start, write_models

FAMILIES = ("qwen", "sdxl", "mochi", "hidream", "sd3", "ltxv")
CASES: dict[str, partial[Prompt]] = {
    "Flux": partial(flux_prompt),
    "Flux, CFG 4, batch of 2, odd size": partial(flux_prompt, cfg=4.0, batch=2, width=72, height=104, tokens=13),
    "Flux, one sequence for all ranks": partial(flux_prompt, cfg=4.0, width=72),
    "Flux, mask over keys": partial(flux_prompt, attention_mask="key", tokens=13),
    "Flux, additive mask": partial(flux_prompt, attention_mask="bias"),
    "Flux, ControlNet residuals": partial(flux_prompt, control={}, cfg=4.0),
    "Flux, LoRA": partial(flux_prompt, loras=["flux_lora"]),
    "Flux, LoRA changed": partial(flux_prompt, loras=[("flux_lora", 0.5)]),
    "Flux, LoRA behind Apply": partial(flux_prompt, loras=[("flux_lora", 0.7)], apply_after_lora=False),
    "Wan": partial(wan_prompt, cfg=4.0),
    "Wan, odd size": partial(wan_prompt, width=72, height=56, frames=5, tokens=15),
}
QUANTISED: dict[str, partial[Prompt]] = {
    "Flux, weight_dtype fp8": partial(flux_prompt, weight_dtype="fp8_e4m3fn"),
    "Flux, fp8 scaled": partial(flux_prompt, ckpt="flux_fp8"),
}
"""A card computes them in half precision, or in fp8."""
AGAIN = ("Flux", "Flux, LoRA", "Wan")
"""Cases that other ways to hold weights and another precision run, too."""


def run(section: Section) -> None:
    """A result per case and kind of server."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        checkpoints.write_all(["flux", "flux_fp8", "flux_lora", "wan_t2v"], models)
        cases = dict(list(CASES.items())[: 2 if section.few else None])
        if not section.few:
            with section.part("tiny models of families"):
                served = {name: entry for name, (_, entry, _) in families.served().items()}
                failed = write_models("support.models", models / "diffusion_models", *FAMILIES).splitlines()[-1]
                if failed != "{}":
                    raise RuntimeError(f"tiny models: {failed[-300:]}")
                cases |= {name: partial(family_prompt, served[name]) for name in FAMILIES}
        again = {name: cases[name] for name in AGAIN if name in cases}
        exact: dict[str, Tensor] = {}
        with section.part("float32"), start(section, models, "--fp32-unet") as server:
            exact = _compare(section, server, cases, "float32")
            for name, graph in () if section.few else QUANTISED.items():
                compare_rounding(server, section, f"{name}, quantised", graph(), _ours(section, name, graph), exact["Flux"])
        if not section.few:
            with section.part("bfloat16"), start(section, models, "--bf16-unet") as server:
                for name in (name for name in AGAIN if name in exact):
                    graph = cases[name]
                    compare_rounding(server, section, f"{name}, bfloat16", graph(), _ours(section, name, graph), exact[name])
        if not (section.few and section.rehearse):
            with section.part("without DynamicVRAM"), start(section, models, "--fp32-unet", "--disable-dynamic-vram") as server:
                _compare(section, server, again, "without DynamicVRAM")


def _ours(section: Section, name: str, graph: partial[Prompt]) -> Prompt:
    alone = {"batch_degree": 1} if "one sequence" in name else {}
    return graph(cp={**section.ranks(2), **alone})


def _compare(section: Section, server: ComfyServer, cases: dict[str, partial[Prompt]], kind: str) -> dict[str, Tensor]:
    """Run the cases; returns the stock latents."""
    found = {
        name: compare(server, section, f"{name}, {kind}", graph(), _ours(section, name, graph)) for name, graph in cases.items()
    }
    return {name: stock for name, stock in found.items() if stock is not None}
