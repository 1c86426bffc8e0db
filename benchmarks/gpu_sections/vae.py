"""CP VAE Decode and CP VAE Encode on a real server: ranks that share the card over gloo, against the stock nodes on the same card.

*exact*, float32: the largest difference, relative to the largest value. bfloat16: the root mean square of the difference to the
stock result in float32, over that of the stock result in bfloat16. *tiles*: the same bits. Of a picture of Flux's full VAE, seconds
and the device memory of a rank are noted beside the stock node's seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.server import ComfyServer
from support.vae_graphs import vae_prompt
from torch import Tensor

from .options import Options
from .results import Results
from .server import ROUNDING, over_stock, sample, start, write_models

EXACT = 1e-5
RANKS = 2
CASES = (("wan", "decode"), ("kl", "decode"), ("wan", "encode"), ("ltxv", "decode"), ("ltxv", "encode"))
TILED = (("taesd", "decode"), ("taesd", "encode"), ("wan", "decode"), ("kl", "decode"))


def run(options: Options, results: Results) -> None:
    """A result per VAE, method and mode."""
    cases, tiled = (CASES[:1], TILED[:1]) if options.few else (CASES, TILED)
    large = () if options.rehearse else ("full_flux",)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        write_models(options, "support.vaes", models, *sorted({name for name, _ in (*cases, *tiled)}), *large)
        stock: dict[tuple[str, str], Tensor] = {}
        with results.part("float32"), start(options, models, "--fp32-vae") as server:
            for case in cases:
                with results.part(f"{' '.join(case)}, exact"):
                    stock[case], out = sample(server, vae_prompt(*case))[0], _on_ranks(server, options, *case, "exact")
                    difference = float((out - stock[case]).abs().max() / stock[case].abs().max())
                    results.check(f"{' '.join(case)}, exact", difference <= EXACT, largest=difference)
            for case in tiled:
                with results.part(f"{' '.join(case)}, tiles"):
                    out = _on_ranks(server, options, *case, "tiles")
                    same = bool((out == sample(server, vae_prompt(*case, "tiled"))[0]).all())
                    results.check(f"{' '.join(case)}, tiles", same)
            for name in large:
                with results.part(name):
                    _large(server, options, results, name)
        if not options.few:
            with results.part("bfloat16"), start(options, models, "--bf16-vae") as server:
                for case, exact in stock.items():
                    theirs, ours = sample(server, vae_prompt(*case))[0], _on_ranks(server, options, *case, "exact")
                    ratio = over_stock(ours, theirs, exact)
                    results.check(f"{' '.join(case)}, bfloat16", ratio <= ROUNDING, rms_over_stock=ratio)


def _on_ranks(server: ComfyServer, options: Options, name: str, method: str, mode: str) -> Tensor:
    return sample(server, vae_prompt(name, method, mode, world=0, devices=options.devices(RANKS), backend="gloo"))[0]


def _large(server: ComfyServer, options: Options, results: Results, name: str) -> None:
    """A picture of 1024 x 1024, each for the second time."""
    size = {"rows": 128, "columns": 128}
    ours = {"mode": "exact", "world": 0, "devices": options.devices(RANKS), "backend": "gloo", **size}
    for again in (False, True):
        (stock, before), (out, after) = (
            sample(server, vae_prompt(name, "decode", seed=3 + again, **settings)) for settings in (size, ours)
        )
    difference = float((out - stock).abs().max() / stock.abs().max())
    memory = max(rank["memory"]["device"] for rank in server.get("/context_parallel/status")["ranks"]) / 1e9
    results.check(
        name, difference <= EXACT, largest=difference, stock_seconds=before.seconds, seconds=after.seconds, device_GB=memory
    )
