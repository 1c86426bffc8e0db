"""Wan for autoregressive sampling, under any other sampler."""

from dataclasses import replace

from . import Case, Served
from .wan import LATENT, PER_FRAME, wan
from .wan import MODELS as WAN_MODELS

CAUSAL = replace(WAN_MODELS["wan t2v"], cls="comfy.ldm.wan.ar_model.CausalWanModel", config="WAN21_CausalAR_T2V")
MODELS = {"causal wan": CAUSAL}
CASES = [
    Case("causal wan", "causal wan", wan),
    Case("causal wan batch 2 odd", "causal wan", lambda: wan(batch=2, frames=5, height=7, width=9, text=5)),
    Case("causal wan per-frame timesteps", "causal wan", lambda: wan(timestep=PER_FRAME)),
]
SERVED = [Served("causal_wan", "causal wan", LATENT, 6, 48)]
