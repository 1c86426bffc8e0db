"""Builds the tiny models of `support.families`. Imports ComfyUI."""

from __future__ import annotations

import importlib

import comfy.ops
import torch
from torch import nn

from .families import Model


def build(spec: Model, seed: int = 1) -> nn.Module:
    """A model whose weights make every token depend on every other one."""
    module, _, cls = spec.cls.rpartition(".")
    model = getattr(importlib.import_module(module), cls)(
        **spec.arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            own = spec.init(name, parameter, values) if spec.init else None
            if own is not None:
                parameter.copy_(own)
            elif "norm" in name and parameter.ndim == 1:
                parameter.copy_(1.5 + 0.1 * values)
            else:
                parameter.copy_(values / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.2 * values)
    return model.eval()
