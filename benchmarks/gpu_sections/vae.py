"""CP VAE Decode and CP VAE Encode on a real server: ranks that share the card over gloo, against the stock nodes on the same card.

*exact*, float32: the largest difference, relative to the largest value. bfloat16: the root mean square of the difference to the
stock result in float32, over that of the stock result in bfloat16. *tiles*: the same bits. Of a picture of Flux's full VAE, seconds
and the device memory of a rank are noted beside the stock node's seconds.
"""

from __future__ import annotations

from functools import partial

from support import card_cases, preloaded
from support.vae_graphs import vae_prompt
from torch import Tensor

from .section import Section
from .server import Server, new_models

EXACT = 1e-5
CASES = (*card_cases.VAES, ("wan", "encode"))
TILED = (("taesd", "decode"), ("taesd", "encode"), ("wan", "decode"), ("kl", "decode"))


def run(section: Section) -> None:
    """Report on every VAE, method and mode."""
    cases, tiled = (CASES[:1], TILED[:1]) if section.few else (CASES, TILED)
    large = () if section.rehearse else ("full_flux",)
    ours, models = partial(vae_prompt, world=0, **section.ranks(2)), new_models()
    preloaded.write_models("support.vaes", models, *sorted({name for name, _ in (*cases, *tiled)}), *large)
    stock: dict[tuple[str, str], Tensor] = {}
    with section.part("float32"), Server(section, models, "--fp32-vae") as server:
        for case in cases:
            name = f"{' '.join(case)}, exact"
            with section.part(name):
                stock[case], out = (server.measured(graph)[0] for graph in (vae_prompt(*case), ours(*case, "exact")))
                difference = _difference(out, stock[case])
                section.check(name, difference <= EXACT, largest=difference)
        for case in tiled:
            name = f"{' '.join(case)}, tiles"
            with section.part(name):
                out, same = (server.measured(graph)[0] for graph in (ours(*case, "tiles"), vae_prompt(*case, "tiled")))
                section.check(name, bool((out == same).all()))
        for file in large:
            with section.part(file):
                _large(section, server, file, ours)
    if not section.few:
        with section.part("bfloat16"), Server(section, models, "--bf16-vae") as server:
            for case, exact in stock.items():
                server.compare_rounding(f"{' '.join(case)}, bfloat16", vae_prompt(*case), ours(*case, "exact"), exact)


def _large(section: Section, server: Server, name: str, ours: partial) -> None:
    """A picture of 1024 x 1024, each for the second time."""
    size = {"rows": 128, "columns": 128}
    for seed in (3, 4):
        stock, before = server.measured(vae_prompt(name, "decode", seed=seed, **size))
        out, after = server.measured(ours(name, "decode", "exact", seed=seed, **size))
    difference = _difference(out, stock)
    memory = max(rank["memory"]["device"] for rank in server.status()["ranks"]) / 1e9
    section.check(
        name, difference <= EXACT, largest=difference, stock_seconds=before.seconds, seconds=after.seconds, device_GB=memory
    )


def _difference(out: Tensor, stock: Tensor) -> float:
    return float((out - stock).abs().max() / stock.abs().max())
