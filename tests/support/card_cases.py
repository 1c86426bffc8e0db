"""What several GPUs must make the same of as one: on fake CUDA devices in the tests, on real ones in the GPU check."""

from functools import partial
from typing import Any

from .graphs import Prompt, flux_prompt, wan_prompt

CHECKPOINTS = ("flux", "flux_lora", "wan_t2v")
VAES = (("wan", "decode"), ("ltxv", "decode"), ("ltxv", "encode"), ("kl", "decode"))
"""By rows: file and method."""

Cases = dict[str, tuple[partial[Prompt], dict[str, Any]]]
"""Graphs, and inputs of CP Config with them."""


def on_one_mesh() -> Cases:
    """Cases that run on the same ranks and with the same weights: others start other ranks."""
    return {
        "Flux": (partial(flux_prompt), {}),
        "Flux, CFG, batch, odd size": (partial(flux_prompt, cfg=4.0, batch=2, width=72, height=104, tokens=13), {}),
        "Flux, sequence only": (partial(flux_prompt, cfg=4.0, width=72), {"batch_degree": 1}),
        "Flux, mask": (partial(flux_prompt, attention_mask="bias"), {}),
        "Flux, mask over keys": (partial(flux_prompt, attention_mask="key", tokens=13), {}),
        "Flux, ControlNet": (partial(flux_prompt, control={}, cfg=4.0), {}),
        "Flux, LoRA": (partial(flux_prompt, loras=["flux_lora"]), {}),
        "Flux, LoRA changed": (partial(flux_prompt, loras=[("flux_lora", 0.5)]), {}),
        "Flux, LoRA behind Apply": (partial(flux_prompt, loras=[("flux_lora", 0.7)], apply_after_lora=False), {}),
        "Wan": (partial(wan_prompt, cfg=4.0), {}),
        "Wan, odd size": (partial(wan_prompt, width=72, height=56, frames=5, tokens=15), {}),
        "Wan, sequence only": (partial(wan_prompt, cfg=4.0), {"batch_degree": 1}),
        "Wan, a patch": (partial(wan_prompt, cfg=4.0, steps=3, model_nodes=[("TestOnTokens", {"kind": "picture"})]), {}),
    }


def cases(ranks: int) -> Cases:
    """All cases. Those of the same inputs follow each other."""
    return {
        **on_one_mesh(),
        "Flux, ring": (partial(flux_prompt), {"ring_degree": ranks, "ulysses_degree": 1}),
        "Flux, chosen ranks": (partial(flux_prompt), {"ranks_per_call": "auto"}),
        "Flux, sharded weights": (partial(flux_prompt), {"weights": "sharded"}),
        "Flux, offloaded weights": (partial(flux_prompt, loras=["flux_lora"]), {"weights": "offloaded"}),
        "Flux, stages": (partial(flux_prompt, cfg=4.0, loras=["flux_lora"]), {"weights": "staged", "world_size": ranks}),
    }
