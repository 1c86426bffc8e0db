"""Real server, real queue: ranks that share the card over gloo, against the stock graph on the same card.

float32: the largest difference, relative to the standard deviation of the latent. bfloat16 and quantised weights: the root mean
square of the difference to the stock graph in float32, over that of the stock graph in the same precision.
"""

from __future__ import annotations

from functools import partial

from support import card_cases, checkpoints, families, preloaded
from support.graphs import Prompt, family_prompt, flux_prompt

from .section import Section
from .server import Server, new_models

FAMILIES = ("qwen", "sdxl", "mochi", "hidream", "sd3", "ltxv")
QUANTISED: dict[str, partial[Prompt]] = {
    "Flux, weight_dtype fp8": partial(flux_prompt, weight_dtype="fp8_e4m3fn"),
    "Flux, fp8 scaled": partial(flux_prompt, ckpt="flux_fp8"),
}
"""A card computes them in half precision, or in fp8."""
AGAIN = ("Flux", "Flux, LoRA", "Wan")
"""Cases that other ways to hold weights and another precision run, too."""


def run(section: Section) -> None:
    """Report on every case and kind of server."""
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
    exact = {}
    with section.part("float32"), Server(section, models, "--fp32-unet") as server:
        exact = server.compare_cases(cases, ", float32")
        for name, graph in () if section.few else QUANTISED.items():
            server.compare_rounding(f"{name}, quantised", graph(), graph(cp=server.cp), exact["Flux"])
    if not section.few:
        with section.part("bfloat16"), Server(section, models, "--bf16-unet") as server:
            for name in (name for name in AGAIN if name in exact):
                graph, _ = cases[name]
                server.compare_rounding(f"{name}, bfloat16", graph(), graph(cp=server.cp), exact[name])
    if not (section.few and section.rehearse):
        with section.part("without DynamicVRAM"), Server(section, models, "--fp32-unet", "--disable-dynamic-vram") as server:
            server.compare_cases(again, ", without DynamicVRAM")
