"""CFG 4: the batch axis against the sequence axis against one rank, through a real ComfyUI server, in one run.

    make bench, or COMFYUI_PATH=... python benchmarks/batch.py [--ranks 2] [--steps 4] [--rounds 3]

Both halves of CFG arrive as one call of two items. One rank is the stock graph; the others share out the items (batch axis), or
the tokens of both (sequence axis, transformers only). What the machine allows is measured with them: N stock servers, each with
one item, which have nothing to do with each other ("apart"). Rounds alternate, and seconds per step are medians over all steps
but the first of each run. One thread per rank, so that one rank has one core and N ranks have N.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import common
import torch
from common import show
from support import checkpoints, preloaded
from support.graphs import Prompt, flux_prompt, sampling_prompt
from support.server import ComfyServer

# 1024 image tokens and 256 of text, hidden 1024; SD1.5's layout, 64 to 128 channels, a latent of 64 x 64.
MODELS: dict[str, Callable[..., Prompt]] = {
    "Flux-like": partial(flux_prompt, ckpt="flux_bench", width=512, height=512, tokens=256),
    "UNet-like": partial(
        sampling_prompt,
        ckpt="family-unet-bench",
        latent={"batch": 1, "channels": 4, "frames": 0, "height": 64, "width": 64},
        conditioning={"tokens": 77, "width": 64},
    ),
}
STOCK, APART = "one rank", "apart"
WAYS: dict[str, dict[str, Any] | None] = {STOCK: None, "batch axis": {"batch_degree": 0}, "sequence axis": {"batch_degree": 1}}


def seconds_per_step(server: ComfyServer, prompt: Prompt) -> tuple[list[float], torch.Tensor]:
    """Seconds of every step but the first, and the latent."""
    result = server.run(prompt, timeout=600).check()
    return server.step_seconds(result), server.latent(result)


def measure(servers: Sequence[ComfyServer], name: str, steps: int, rounds: int) -> None:
    """Run all ways in turn, show a line each."""
    graph = partial(MODELS[name], steps=steps)
    ways = {way: cp for way, cp in WAYS.items() if (name, way) != ("UNet-like", "sequence axis")}
    times: defaultdict[str, list[float]] = defaultdict(list)
    latents: dict[str, torch.Tensor] = {}
    for _ in range(rounds):
        for way, cp in ways.items():
            settings = None if cp is None else {"world_size": len(servers), **cp}
            seconds, latents[way] = seconds_per_step(servers[0], graph(cfg=4.0, cp=settings))
            times[way] += seconds
            time.sleep(0.5)
        with ThreadPoolExecutor(len(servers)) as threads:  # of every step, the slowest of them
            runs = [seconds for seconds, _ in threads.map(seconds_per_step, servers, [graph(cfg=1.0)] * len(servers))]
        times[APART] += [max(step) for step in zip(*runs, strict=True)]
        time.sleep(0.5)
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    expected = latents[STOCK]
    for way, median in medians.items():
        speedup = medians[STOCK] / median
        ratios, figures = ({"speed-up": speedup}, {}) if way not in (STOCK, APART) else ({}, {"times one rank": speedup})
        if way in latents:
            figures["difference in std"] = ((latents[way] - expected).abs().max() / expected.std()).item()
        show(f"{name}, {way}", ratios, s_per_step=median, times_apart=medians[APART] / median, **figures)


def main() -> None:
    options = common.options(__doc__, "one round", ranks=2, steps={"default": 4, "help": "sampling steps, at least 2"}, rounds=3)
    comfyui = common.comfyui()
    show("batch", **common.machine(), ranks=options.ranks, CFG=4)
    with common.models() as models, contextlib.ExitStack() as stack:
        checkpoints.write_flux("flux_bench", models, hidden=1024, double_blocks=2, single_blocks=4)
        preloaded.write_models("support.models", models / "diffusion_models", "unet-bench")
        serve = partial(ComfyServer, comfyui, models=models, args=["--use-pytorch-cross-attention"], env={"OMP_NUM_THREADS": "1"})
        servers = [stack.enter_context(serve()) for _ in range(options.ranks)]
        for name in MODELS:
            measure(servers, name, options.steps, 1 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
