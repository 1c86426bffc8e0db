"""Take over the attention of any module that calls torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compat import fused_attention_functions, not_compiled
from ..engine.call import RunningCall
from ..errors import PlanError
from ..nested import tensors
from . import agreement
from .agreement import Decision
from .provenance import Mark, Provenance

FUSED = fused_attention_functions()
REMEDY = (
    "Say in the plan what the module attends to, in joint order: {path of the module: ModulePlan(attention=(...))}; attention=() "
    "where keys and values are whole on every rank."
)


Record = dict[str, list[tuple[Decision, tuple[int, int]]]]
"""Decisions of one call, in order, with this rank's numbers of queries and keys, by attending module. Calls of the same form reuse
them."""


class SharedAttention(TorchFunctionMode):
    """While active, shares attention over all ranks where the call needs it. `known`: what a call of the same form has found out;
    None = this one finds out, for `record`."""

    def __init__(self, call: RunningCall, known: Record | None) -> None:
        super().__init__()
        self._call, self._known = call, known
        self.record: Record = {}
        self._provenance: Provenance | None = None
        if known is None:
            self._provenance = call.followed = Provenance()

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
        if self._provenance is not None:
            self._provenance.follow(func, args, kwargs, out)
        return out

    @not_compiled
    def check_output(self, out: Any) -> None:
        """Raise PlanError, on all ranks alike, if tokens were combined out of reach, or the output holds only a part of them.

        Only the first call of a form finds that out.
        """
        if self._provenance is not None:
            error = self._provenance.refused or self._not_gathered(self._provenance, out)
            agreement.agree(error, self._call.mesh.whole, agreement.device_of(out))

    @staticmethod
    def _not_gathered(provenance: Provenance, out: Any) -> PlanError | None:
        marks = [mark for tensor in tensors(out) if (mark := provenance.of(tensor)) is not None]
        if not marks:
            return None
        names = [name for mark in marks for name, _ in mark if name is not None]
        what = f"this rank's tokens of {' and '.join(dict.fromkeys(names))}" if names else "a part of the tokens"
        return PlanError(
            f"the output holds {what} only: they were split and not gathered. Add to the plan the last module that treats each "
            "token alone: {its path: ContextParallelOutput(gather_dim=1)}."
        )

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
        streams, local = self._decision(query, key)
        if local:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        elif query.ndim != 4 or dropout_p or (attn_mask is not None and is_causal):
            raise PlanError(
                f"scaled_dot_product_attention with a query of {tuple(query.shape)}, dropout_p={dropout_p}, is_causal={is_causal}: "
                "shared attention takes [batch, heads, tokens, channels], no dropout, and a mask or is_causal. Put the model in "
                "eval mode."
            )
        else:
            q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out = self._call.attend(q, k, v, mask=attn_mask, scale=scale, causal=is_causal, streams=streams, own_masks=True)
            out = out.transpose(1, 2)
        if self._provenance is not None:
            self._provenance.mark(out, self._provenance.of(query))
        return out

    def _decision(self, query: Tensor, key: Tensor) -> Decision:
        scope = self._call.scope
        if not scope.derived or not self._call.state.lengths:  # the plan says it, or nothing is split
            local = self._call.attention_is_local
            if local and self._provenance is not None:
                self._provenance.refused = self._provenance.refused or self._not_said(self._provenance, key)
            return Decision(None, local)
        made, numbers = self.record.setdefault(scope.name, []), (query.shape[-2], key.shape[-2])
        if self._provenance is not None:
            try:
                told: Decision | PlanError = self._provenance.refused or self._told(
                    self._provenance.of(query), self._provenance.of(key), query, key
                )
            except PlanError as error:
                told = error
            decision = agreement.decide(told, self._call.mesh.whole, query.device)
        else:
            before = (self._known or {}).get(scope.name, [])
            decision, expected = before[len(made)] if len(made) < len(before) else (self._by_numbers(query, key), numbers)
            if numbers != expected:
                raise PlanError(
                    f"{scope.name or 'the model'}: attention of {numbers[0]} queries over {numbers[1]} keys, where the first call "
                    f"of this form had {expected[0]} and {expected[1]}: the model has changed, or a number that it was given made "
                    "it take another way. Call it again: that way is then found out. What decides between ways every time is best "
                    "passed as a bool, an int or a str."
                )
        made.append((decision, numbers))
        return decision

    def _not_said(self, provenance: Provenance, key: Tensor) -> PlanError | None:
        """Return what is wrong if each rank would attend to its own keys alone without the plan saying so."""
        scope, lengths = self._call.scope, self._call.state.lengths
        if (scope.said and not scope.streams) or not lengths or provenance.of(key) is None:
            return None
        streams = dict.fromkeys(name for pair in scope.streams for names in pair for name in names if name not in lengths)
        what = f"names {' and '.join(streams)}, of which nothing was split" if streams else "does not say what it is over"
        return PlanError(
            f"{scope.name or 'the model'}: attention over {key.shape[-2]} keys of split tokens, and the plan {what}. Streams of "
            f"this call: {', '.join(lengths)}. {REMEDY}"
        )

    def _told(self, q: Mark | None, k: Mark | None, query: Tensor, key: Tensor) -> Decision:
        """Decide what an attention is over by the marks of its queries and keys."""
        queries, keys = _names(q, query), _names(k, key)
        if queries and keys:
            return Decision((queries, keys), local=False)
        if k is not None and any(name is None for name, _ in k):
            what = " and ".join(f"{tokens} {'that every rank has whole' if name is None else f'of {name}'}" for name, tokens in k)
            raise PlanError(
                f"attention over keys of two kinds, {what}: the whole ones would count once for every rank. Split them too, or "
                "make them a stream that is kept whole: "
                'ContextParallelInput(1, 3, streams=("encoder_hidden_states",), replicated=True).'
            )
        if queries and k is None and not (self._provenance and self._provenance.left_torch):  # such as an image prompt's
            return Decision(None, local=True)
        if k is not None and not self._call.scope.streams:
            raise PlanError(
                f"attention over {key.shape[-2]} keys: they come from tokens that are split over the ranks, and from which cannot "
                f"be told. {REMEDY}"
            )
        return self._by_numbers(query, key)

    def _by_numbers(self, query: Tensor, key: Tensor) -> Decision:
        """Decide by numbers of tokens where they were not followed; that works for a single stream."""
        local = self._call.attention_is_local
        if not local and any(len(streams) > 1 for streams, _ in self._call.scope.streams):
            raise PlanError(
                f"attention of {query.shape[-2]} queries over {key.shape[-2]} keys: its tokens could not be followed, or it did "
                "not take place in the first call of this form, so that which streams they are, and in which order, is not known. "
                f"{REMEDY}"
            )
        return Decision(None, local)


def _names(mark: Mark | None, tensor: Tensor) -> tuple[str, ...]:
    """Return the streams in `[batch, heads, tokens, channels]`; none if they are unknown."""
    if not mark or sum(tokens for _, tokens in mark) != tensor.shape[-2]:
        return ()
    names = tuple(name for name, _ in mark if name is not None)
    return names if len(names) == len(mark) else ()
