"""Agreements between ranks, so that they multiply quantised weights as one process does.

ComfyUI quantises the input of a linear layer too, where the hardware multiplies in that format. Most formats have a scale per token
or per block of channels, so a rank's tokens do not depend on those of other ranks. NVFP4 has one scale for the whole input, the
largest absolute value over (448 * 6); unless it is in the file, it is taken from the input, and so from all ranks. Ranks meet for
that in every layer, so all of them must run it: `ui.obstacles` refuses experts.

Where a device cannot multiply in a format, all cast. A faster one may win by itself, natively: its runs are as on it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.quant_ops
import torch
from torch import Tensor, nn

from ...engine.ranks.collectives import RankGroup
from ..shared.formats import cast_others, formats_of, set_cast
from ..shared.values import Facts

LARGEST = 448.0 * 6.0  # largest block scale (float8_e4m3) times largest value (float4_e2m1)


def own_formats(
    model: nn.Module, facts: Facts, device: torch.device, kinds: Collection[str]
) -> tuple[tuple[str, ...], tuple[nn.Module, ...]]:
    """Return the quantised formats of a model or VAE that this device multiplies natively, and the layers that it could multiply
    so, too, but casts as other ranks do.

    Args:
        kinds: formats that the devices of all ranks multiply in: layers in others are cast here too.
    """
    quantised = any(isinstance(weight, comfy.quant_ops.QuantizedTensor) for weight in model.parameters())
    if not (quantised or facts.fast):
        return (), ()
    able = formats_of(device)
    if facts.fast:  # --fast is a property of the layers' class
        return tuple(able), ()
    cast = tuple(layer for layer, kind in cast_others(model, kinds).items() if kind in able)
    return tuple(kind for kind in able if kind in kinds), cast


@contextmanager
def multiplied_natively(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Have this device multiply layers natively that it casts for the sake of others, inside the context."""
    for layer in layers:
        set_cast(layer, False)
    try:
        yield
    finally:
        for layer in layers:
            set_cast(layer, True)


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
