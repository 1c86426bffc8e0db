"""Real server, real queue: ranks that share the card over gloo, against the stock graph on the same card.

float32: the largest difference, relative to the standard deviation of the latent. bfloat16 and quantised weights: the root mean
square of the difference to the stock graph in float32, over that of the stock graph in the same precision.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from support import checkpoints, families
from support.graphs import Prompt, family_prompt, flux_prompt, wan_prompt
from support.server import ComfyServer
from torch import Tensor

from .options import Options
from .results import Results
from .server import ROUNDING, compare, over_stock, sample, start, write_families

RANKS = 2

FAMILIES = ("qwen", "sdxl", "mochi", "hidream")
FLUX: dict[str, partial[Prompt]] = {
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
SETTINGS: dict[str, dict[str, Any]] = {"Flux, one sequence for all ranks": {"batch_degree": 1}}
"""Of CP Config, beyond the number of ranks."""
OTHERS = ("sd3", "ltxv")
AGAIN = ("Flux", "Flux, LoRA", "Wan")
"""Cases that other ways to hold weights and another precision run, too."""


def run(options: Options, results: Results) -> None:
    """A result per case and kind of server."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        checkpoints.write_all(["flux", "flux_fp8", "flux_lora", "wan_t2v"], models)
        cases: dict[str, partial[Prompt]] = dict(list(FLUX.items())[:2]) if options.few else dict(FLUX)
        if not options.few:
            with results.part("tiny models of families"):
                served = {name: entry for name, (_, entry, _) in families.served().items()}
                names = [*FAMILIES, *OTHERS]
                write_families(options, models, names)
                cases |= {name: partial(family_prompt, served[name]) for name in names}
        exact: dict[str, Tensor] = {}
        with results.part("float32"), start(options, models, "--fp32-unet") as server:
            exact = _compare(server, cases, options, results, "float32")
            if not options.few:
                _compare_rounding(server, QUANTISED, dict.fromkeys(QUANTISED, exact["Flux"]), options, results, "quantised")
        again = {name: cases[name] for name in AGAIN if name in cases}
        if not options.few:
            with results.part("bfloat16"), start(options, models, "--bf16-unet") as server:
                known = {name: graph for name, graph in again.items() if name in exact}
                _compare_rounding(server, known, exact, options, results, "bfloat16")
        if not (options.few and options.rehearse):
            with results.part("without DynamicVRAM"), start(options, models, "--fp32-unet", "--disable-dynamic-vram") as server:
                _compare(server, again, options, results, "without DynamicVRAM")


def _config(name: str, options: Options) -> dict[str, Any]:
    return {"devices": options.devices(RANKS), "backend": "gloo", **SETTINGS.get(name, {})}


def _compare(
    server: ComfyServer, cases: dict[str, partial[Prompt]], options: Options, results: Results, kind: str
) -> dict[str, Tensor]:
    """Run the cases; returns the stock latents."""
    found = {
        name: compare(server, results, f"{name}, {kind}", graph(), graph(cp=_config(name, options)))
        for name, graph in cases.items()
    }
    return {name: stock for name, stock in found.items() if stock is not None}


def _compare_rounding(
    server: ComfyServer, cases: dict[str, partial[Prompt]], exact: dict[str, Tensor], options: Options, results: Results, kind: str
) -> None:
    for name, graph in cases.items():
        with results.part(f"{name}, {kind}"):
            stock, out = sample(server, graph())[0], sample(server, graph(cp=_config(name, options)))[0]
            ratio = over_stock(out, stock, exact[name])
            results.check(f"{name}, {kind}", ratio <= ROUNDING, rms_over_stock=ratio)
