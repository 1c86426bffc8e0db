"""Wan for autoregressive sampling. Without such a sampler's state it is an ordinary Wan; with it, it is refused."""

from dataclasses import replace

from . import wan

CAUSAL_WAN = replace(wan.WAN, family="Causal Wan", model_class="comfy.ldm.wan.ar_model.CausalWanModel")
