"""Take over the attention of any module that calls torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compat import fused_attention_functions, not_compiled
from ..engine.call import RunningCall
from ..engine.state import AttentionStreams
from ..errors import PlanError

FUSED = fused_attention_functions()
MEANS = {torch.mean, Tensor.mean}
REMEDY = (
    "Say in the plan what the module attends to, in joint order: {path of the module: ModulePlan(attention=(...))}; attention=() "
    "where keys and values are whole on every rank."
)


class SharedAttention(TorchFunctionMode):
    """A mode that shares attention over all ranks where the call needs it."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in FUSED and not self._call.attention_is_local:
            raise PlanError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends out of reach. Use a module that "
                "calls scaled_dot_product_attention, or say that keys and values are replicated: ModulePlan(attention=())."
            )
        out = func(*args, **kwargs)
        if func in MEANS and out.ndim == 0 and self._call.state.lengths and self._call.mesh.size > 1:
            return self._mean(out, args[0] if args else kwargs["input"])
        return out

    @not_compiled
    def _mean(self, own: Tensor, values: Tensor) -> Tensor:
        """Return the mean over the elements of all ranks, the same on each: caches use it to choose the same path."""
        counted = torch.stack([own.double() * values.numel(), own.new_tensor(values.numel(), dtype=torch.float64)])[None]
        (rows,) = self._call.mesh.whole.all_gather([counted], [1] * self._call.mesh.size, 0)
        total, count = rows.sum(0)
        mean: Tensor = (total / count).to(own.dtype)
        return mean

    @not_compiled
    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        streams = self._streams(query, key)
        if not streams[1]:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.ndim != 4 or dropout_p or (attn_mask is not None and is_causal):
            raise PlanError(
                f"scaled_dot_product_attention with a query of {tuple(query.shape)}, dropout_p={dropout_p}, is_causal={is_causal}: "
                "shared attention takes [batch, heads, tokens, channels], no dropout, and a mask or is_causal. Put the model in "
                "eval mode."
            )
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self._call.attend(q, k, v, mask=attn_mask, scale=scale, causal=is_causal, streams=streams, own_masks=True)
        return out.transpose(1, 2)

    def _streams(self, query: Tensor, key: Tensor) -> AttentionStreams:
        """Return the streams of queries and keys; none of keys where every rank has all of them. Raises PlanError if the plan
        leaves the streams open, or contradicts them."""
        call, scope, state = self._call, self._call.scope, self._call.state
        name, numbers = scope.name or "the model", (query.shape[-2], key.shape[-2])
        if call.attention_is_local:
            if state.lengths and state.world_size > 1 and (scope.streams or not scope.said):
                unknown = dict.fromkeys(sum((q + k for q, k in scope.streams), ())).keys() - state.lengths.keys()
                what = f"names {' and '.join(unknown)}, of which nothing was split" if unknown else "does not say what it is over"
                raise PlanError(
                    f"{name}: attention over {numbers[1]} keys beside split tokens, and the plan {what}. Streams of this call: "
                    f"{', '.join(state.lengths)}. {REMEDY}"
                )
            return (), ()

        def held(streams: tuple[str, ...]) -> int:
            return state.layout(streams).local_lengths[state.rank]

        known = [pair for pair in scope.streams if call.knows(pair)]
        fitting = [(q, k) for q, k in known if held(q) == numbers[0] and (not k or held(k) == numbers[1])]
        if not fitting:
            own = ", ".join(f"{stream} {held((stream,))}" for stream in state.lengths)
            raise PlanError(
                f"{name}: attention of {numbers[0]} queries over {numbers[1]} keys does not fit the tokens of rank {state.rank} "
                f"({own}). {REMEDY}"
            )
        return fitting[0]
