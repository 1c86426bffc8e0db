"""Takes over the attention of any module that calls torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compat import fused_attention_functions
from ..engine.call import RunningCall
from ..errors import PlanError

FUSED = fused_attention_functions()


class SharedAttention(TorchFunctionMode):
    """While active, attention that the call has to share goes over all ranks."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (func is not F.scaled_dot_product_attention and func not in FUSED) or self._call.attention_is_local:
            return func(*args, **(kwargs or {}))
        if func in FUSED:
            raise PlanError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends out of reach. Use a module that "
                "calls scaled_dot_product_attention, or say that keys and values are replicated: ModulePlan(attention=())."
            )
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.ndim != 4 or dropout_p or (attn_mask is not None and is_causal):
            raise PlanError(
                f"scaled_dot_product_attention with a query of {tuple(query.shape)}, dropout_p={dropout_p}, is_causal={is_causal}: "
                "shared attention takes [batch, heads, tokens, channels], no dropout, and a mask or is_causal. Put the model in "
                "eval mode."
            )
        out_BLHD = self._call.attend(
            *(t.transpose(1, 2) for t in (query, key, value)), mask=attn_mask, scale=scale, causal=is_causal
        )
        return out_BLHD.transpose(1, 2)
