"""Agreements between ranks, so that they multiply quantised weights as one process does.

ComfyUI quantises the input of a linear layer too, where the hardware multiplies in that format. Most formats scale every token or
every block of channels on its own, so that a rank's tokens come out the same whoever else has some. NVFP4 has one scale for the
whole input, the largest absolute value over (448 * 6); without one in the file it is taken from the input, and so from all ranks.
Ranks meet for that in every layer, also in experts that have tokens on some of them only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import comfy.model_management
import comfy.quant_ops
import torch
from comfy.cli_args import PerformanceFeature, args
from torch import Tensor, nn

from ...engine.collectives import RankGroup

LARGEST = 448.0 * 6.0  # largest block scale (float8_e4m3) times largest value (float4_e2m1)


def own_formats(model: Any, device: torch.device) -> list[str]:
    """Return the quantised formats of a `BaseModel` or VAE that this device multiplies in by itself; for others ComfyUI casts."""
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


class Experts:
    """The experts of a block, as quantised ones need it: all run, in their order, after the gate and before the shared ones.

    One that no token of this rank is for (`absent`) runs on a zero, which counts for nothing and is thrown away.
    """

    absent: ClassVar[bool] = False

    def __init__(self, block: Any) -> None:
        self._experts = block.experts
        block.gate.register_forward_pre_hook(self._begin)
        block.shared_experts.register_forward_pre_hook(self._end)
        for number, expert in enumerate(block.experts):
            expert.register_forward_pre_hook(partial(self._enter, number))
            expert.register_forward_hook(self._leave)

    @classmethod
    def find(cls, model: nn.Module) -> None:
        """Do so with every block that has a list of experts."""
        for module in model.modules():
            if {"gate", "experts", "shared_experts"} <= dict(module.named_children()).keys():
                cls(module)

    def _begin(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._next, self._nothing = 0, inputs[0].flatten(0, -2)[:0]

    def _enter(self, number: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._run_until(number)
        self._next = number + 1
        Experts.absent = not len(inputs[0])
        return (inputs[0].new_zeros(1, inputs[0].shape[1]),) if Experts.absent else inputs

    def _leave(self, _: nn.Module, inputs: object, out: Tensor) -> Tensor:
        absent, Experts.absent = Experts.absent, False
        return out[:0] if absent else out

    def _end(self, *_: object) -> None:
        self._run_until(len(self._experts))

    def _run_until(self, number: int) -> None:
        for expert in self._experts[self._next : number]:
            expert(self._nothing)


@contextmanager
def shared_scales(ranks: RankGroup) -> Iterator[None]:
    """Take scales of an input from the inputs of all ranks, inside the context. Every rank runs the same layers."""
    layout = comfy.quant_ops.TensorCoreNVFP4Layout
    own = vars(layout)["quantize"]
    quantize = layout.quantize

    def quantize_shared(cls: Any, /, tensor: Tensor, scale: Any = None, **kwargs: Any) -> Any:
        if scale is None:
            own = tensor.abs().amax().float()
            scale = ranks.largest(torch.zeros_like(own) if Experts.absent else own) / LARGEST
        return quantize(tensor, scale, **kwargs)

    # A compiled block that calls it stays as it is: ranks meet in here, and the function is another one in every call.
    layout.quantize = classmethod(torch.compiler.disable(quantize_shared))
    try:
        yield
    finally:
        layout.quantize, Experts.absent = own, False  # a call may have ended by an error
