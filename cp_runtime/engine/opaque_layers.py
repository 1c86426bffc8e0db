"""Linear layers with quantised weights as one operator that is opaque to compilers.

Where a device multiplies in the weights' format, such a layer quantises its input, too: a tensor made inside the graph with Python
attributes, which torch's compiler cannot trace. A graph is compiled for all blocks of a class, so the operator identifies a layer
by its number within the running block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import PlanError
from .attention.opaque import COMPILING


def make_opaque(block: nn.Module) -> list[nn.Module]:
    """Route a block's quantised linear layers through the operator, until `del layer.forward`. Return them."""
    layers = [layer for layer in block.modules() if _is_quantised(layer) and "forward" not in vars(layer)]
    for number, layer in enumerate(layers):
        layer.forward = partial(_forward, layer, number)
    return layers


@torch.library.custom_op("context_parallel::linear", mutates_args=())
def linear(x: Tensor, layer: int, features: int, input_act: str) -> Tensor:
    """Run a linear layer of the running block.

    Args:
        x: `[..., in features]`; `[..., 2 * in features]` for an activation with a gate.
        layer: its number within the block.
        features: out features.
        input_act: name of an activation of x, which ComfyUI's layers fuse since 0.40; "" = none.

    Returns:
        `[..., features]` in x's dtype, contiguous.
    """
    if not COMPILING.in_block:
        raise PlanError("a compiled block ran outside of a sharded call")
    module = COMPILING.layers[layer]
    out: Tensor = type(module).forward(module, x, **({"input_act": input_act} if input_act else {}))
    return out.contiguous()


@linear.register_fake
def _(x: Tensor, layer: int, features: int, input_act: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def _forward(layer: Any, number: int, x: Tensor, input_act: str | None = None, **fused: Any) -> Any:
    if fused:  # with tensors of its own; a block that the compiler cannot trace then runs as it is
        return type(layer).forward(layer, x, input_act=input_act, **fused)
    return linear(x, number, layer.out_features, input_act or "")


def _is_quantised(layer: nn.Module) -> bool:
    weight: Any = getattr(layer, "weight", None)
    return is_traceable_wrapper_subclass(weight) and hasattr(layer, "out_features")
