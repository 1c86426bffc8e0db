"""What several GPUs must make the same of as one: on fake CUDA devices in the tests, on real ones in the GPU check."""

from __future__ import annotations

from functools import partial
from typing import Any

from .graphs import Prompt, flux_prompt, wan_prompt

CHECKPOINTS = ("flux", "flux_lora", "wan_t2v")
VAES = (("wan", "decode"), ("ltxv", "decode"), ("ltxv", "encode"), ("kl", "decode"))
"""By rows: file and method."""


def cases(ranks: int) -> dict[str, tuple[partial[Prompt], dict[str, Any]]]:
    """Graphs, and inputs of CP Config with them. Those of the same inputs follow each other: others start other ranks."""
    return {
        "Flux": (partial(flux_prompt), {}),
        "Flux, CFG, batch, odd size": (partial(flux_prompt, cfg=4.0, batch=2, width=72, height=104, tokens=13), {}),
        "Flux, mask": (partial(flux_prompt, attention_mask="bias"), {}),
        "Flux, ControlNet": (partial(flux_prompt, control={}, cfg=4.0), {}),
        "Flux, LoRA": (partial(flux_prompt, loras=["flux_lora"]), {}),
        "Flux, LoRA changed": (partial(flux_prompt, loras=[("flux_lora", 0.5)]), {}),
        "Wan, CFG": (partial(wan_prompt, cfg=4.0), {}),
        "Wan, sequence only": (partial(wan_prompt, cfg=4.0), {"batch_degree": 1}),
        "Flux, ring": (partial(flux_prompt), {"ring_degree": ranks, "ulysses_degree": 1}),
        "Flux, a team": (partial(flux_prompt), {"ranks_per_call": "auto"}),
        "Flux, sharded weights": (partial(flux_prompt), {"weights": "sharded"}),
        "Flux, offloaded weights": (partial(flux_prompt, loras=["flux_lora"]), {"weights": "offloaded"}),
    }
