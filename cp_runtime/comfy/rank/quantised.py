"""Agreements between ranks, so that they multiply quantised weights as one process does.

ComfyUI quantises the input of a linear layer too, where the hardware multiplies in that format. Most formats have a scale per token
or per block of channels, so a rank's tokens do not depend on those of other ranks. NVFP4 has one scale for the whole input, the
largest absolute value over (448 * 6); unless it is in the file, it is taken from the input, and so from all ranks. Ranks meet for
that in every layer, so all of them must run it: `ui.obstacles` refuses experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.quant_ops
import torch
from comfy.cli_args import PerformanceFeature, args
from torch import Tensor

from ...engine.ranks.collectives import RankGroup

LARGEST = 448.0 * 6.0  # largest block scale (float8_e4m3) times largest value (float4_e2m1)


def own_formats(model: Any, device: torch.device) -> list[str]:
    """Return the quantised formats of a `BaseModel` or VAE that this device multiplies natively; for others ComfyUI casts."""
    quantised = any(isinstance(weight, comfy.quant_ops.QuantizedTensor) for weight in model.parameters())
    optimizations = model.model_config.optimizations if hasattr(model, "model_config") else {}
    fast = optimizations.get("fp8", False) or PerformanceFeature.Fp8MatrixMultiplication in args.fast
    if not (quantised or fast):
        return []
    management = comfy.model_management
    able = {
        "fp8": management.supports_fp8_compute(device),
        "mxfp8": management.supports_mxfp8_compute(device),
        "nvfp4": management.supports_nvfp4_compute(device),
    }
    return [name for name, supported in able.items() if supported]


@contextmanager
def shared_scales(ranks: RankGroup) -> Iterator[None]:
    """Compute scales of an input over the inputs of all ranks, inside the context. Every rank runs the same layers."""
    layout = comfy.quant_ops.TensorCoreNVFP4Layout
    own = vars(layout)["quantize"]
    quantize = layout.quantize

    def quantize_shared(cls: Any, /, tensor: Tensor, scale: Any = None, **kwargs: Any) -> Any:
        if scale is None:
            scale = ranks.largest(tensor.abs().amax().float()) / LARGEST
        return quantize(tensor, scale, **kwargs)

    # Compilation skips a block that calls it: ranks meet in here, and the function is a new one in every call.
    layout.quantize = classmethod(torch.compiler.disable(quantize_shared))
    try:
        yield
    finally:
        layout.quantize = own
