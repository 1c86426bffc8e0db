"""Take over the attention of any module that calls torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compat import frames_are_compiled, fused_attention_functions, not_compiled, replaced_backends
from ..engine.attention.opaque import COMPILING, Asked, attention
from ..engine.call import RunningCall
from ..engine.hooks import decode_streams
from ..engine.ranks.collectives import RankGroup
from ..engine.state import AttentionStreams
from ..errors import PlanError

FUSED = fused_attention_functions()
MEANS = {torch.mean, Tensor.mean}
# Methods of tensors that are written in Python call `super()`, which torch's compiler does not trace below a mode.
TRACED_AS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.unflatten: torch.unflatten,
    Tensor.split: torch.split,
    Tensor.norm: torch.norm,
}
REMEDY = (
    "Say in the plan what the module attends to, in joint order: {path of the module: ModulePlan(attention=(...))}; attention=() "
    "where keys and values are whole on every rank."
)

KERNELS = {"flash": "flash_attn", "sage": "sage"}  # beginnings of names of diffusers' backends -> kernels for a ring that merges


class Backend(NamedTuple):
    """An attention backend of diffusers that is not torch's: its name, its function, and what that was given."""

    name: str
    function: Callable[..., Tensor]
    given: dict[str, Any]

    def attend(self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHSD, k_BKSD, v_BKSD))
        mask_or_none = {"attn_mask": mask} if mask is not None or "attn_mask" in self.given else {}
        return self.function(**{**self.given, "query": q, "key": k, "value": v, **mask_or_none}).transpose(1, 2)

    @property
    def kernel(self) -> str | None:
        return next((kernel for name, kernel in KERNELS.items() if self.name.lstrip("_").startswith(name)), None)


class SharedAttention(TorchFunctionMode):
    """A mode that shares attention over all ranks where the call needs it. `everyone`: the ranks of all batch groups."""

    def __init__(self, call: RunningCall, everyone: RankGroup) -> None:
        super().__init__()
        self._call, self._everyone, self._answering = call, everyone, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._answering:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _traced(*args, **kwargs) if torch.compiler.is_compiling() else self._attention(*args, **kwargs)
        if func in FUSED and not self._call.attention_is_local:
            raise PlanError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends out of reach. Use a module that "
                "calls scaled_dot_product_attention, or say that keys and values are replicated: ModulePlan(attention=())."
            )
        if torch.compiler.is_compiling():
            return TRACED_AS.get(func, func)(*args, **kwargs)
        out = func(*args, **kwargs)
        # A step cache decides by such a number whether blocks run: ranks that decided differently would wait for each other.
        if func in MEANS and out.ndim == 0 and out.is_floating_point() and self._everyone.size > 1:
            return self._mean(args[0] if args else kwargs["input"]).to(out.dtype)
        return out

    @not_compiled
    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean over the elements of all ranks, the same on each: caches use it to choose the same path."""
        own = self._call.owned(values)
        total = own.sum(dtype=torch.float32 if own.device.type == "xpu" else torch.float64)  # some of Intel's GPUs have no float64
        counted = torch.stack([total, torch.full_like(total, own.numel())])[None]
        (rows,) = self._everyone.all_gather([counted], [1] * self._everyone.size, 0)
        return rows[:, 0].sum() / rows[:, 1].sum()

    def attend_once(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend where torch's function is replaced: inside of it, it is torch's."""
        if self._answering:
            return _stock(*args, **kwargs)
        self._answering = True
        try:
            return self._attention(*args, **kwargs)
        finally:
            self._answering = False

    @not_compiled
    def attend_by(self, backend: Backend) -> Tensor:
        """Attend by a backend of diffusers, with what it was given: tensors `[B, tokens, heads, channels]`."""
        if self._answering:
            return backend.function(**backend.given)
        given: Callable[..., Any] = backend.given.get
        self._answering, of = True, self._call.scope
        try:
            return self._attend(
                given("query"), given("key"), given("value"), given("attn_mask"), given("dropout_p", 0.0),
                given("is_causal", False), given("scale"), given("enable_gqa", False), of.name, of.streams, backend,
            )  # fmt: skip
        finally:
            self._answering = False

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
        q, k, v = (tensor.transpose(-3, -2) for tensor in (query, key, value))
        of = self._call.scope
        out = self._attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, of.name, of.streams)
        return out.transpose(-3, -2)

    def answer(self, asked: Asked) -> Tensor:
        """Attend for compiled code. `asked.low_precision`: it is causal."""
        scope = self._call.scope
        traced_scope, _, name = asked.backend.partition("@")
        by_plan, traced = decode_streams(traced_scope)
        candidates = traced if by_plan or (scope.derived and traced_scope) else scope.streams
        backend = _traced_backend(name, asked) if name else None
        self._answering = True
        try:
            return self._attend(*asked[:4], 0.0, asked.low_precision, asked.scale, asked.grouped, scope.name, candidates, backend)
        finally:
            self._answering = False

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        grouped: bool,
        name: str,
        candidates: Sequence[AttentionStreams],
        backend: Backend | None = None,
    ) -> Tensor:
        """Attend with tensors `[..., tokens, heads, channels]`. `name`, `candidates`: of the scope."""
        streams = self._streams(q.shape[-3], k.shape[-3], name or "the model", candidates)
        if not streams[1] and backend is not None:
            return backend.function(**backend.given)
        if not streams[1]:
            q, k, v = (tensor.transpose(-3, -2) for tensor in (q, k, v))
            out = _stock(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
            return out.transpose(-3, -2)
        if q.ndim != 4 or dropout or (mask is not None and causal):
            raise PlanError(
                f"scaled_dot_product_attention with a query of {q.ndim} dimensions, dropout_p={dropout}, is_causal={causal}: "
                "shared attention takes [batch, heads, tokens, channels], no dropout, and a mask or is_causal. "
                "Call the model's method eval."
            )
        attend, kernel = (None, None) if backend is None else (backend.attend, backend.kernel)
        return self._call.attend(
            q, k, v, mask=mask, scale=scale, attend=attend, kernel=kernel, causal=causal, streams=streams, own_masks=True
        )

    def _streams(self, queries: int, keys: int, name: str, candidates: Sequence[AttentionStreams]) -> AttentionStreams:
        """Return the streams of queries and keys, given their numbers; none of keys where every rank has all of them.

        Raises:
            PlanError: the plan does not say what the attention is over, or says something else.
        """
        call, scope, state = self._call, self._call.scope, self._call.state
        if candidates and state.in_turn:
            candidates = [call.next_in_turn()]
        known = [pair for pair in candidates if call.knows(pair)]
        if not known or not call.shares:
            if state.lengths and state.world_size > 1 and (candidates or not scope.by_plan):
                unknown = dict.fromkeys(sum((q + k for q, k in candidates), ())).keys() - state.lengths.keys()
                what = f"names {' and '.join(unknown)}, of which nothing was split" if unknown else "does not say what it is over"
                raise PlanError(
                    f"{name}: attention over {keys} keys beside split tokens, and the plan {what}. Streams of this call: "
                    f"{', '.join(state.lengths)}. {REMEDY}"
                )
            return (), ()

        def held(streams: tuple[str, ...]) -> int:
            return state.layout(streams).local_lengths[state.rank]

        fitting = [(q, k) for q, k in known if held(q) == queries and (not k or held(k) == keys)]
        if not fitting:
            own = ", ".join(f"{stream} {held((stream,))}" for stream in state.lengths)
            raise PlanError(
                f"{name}: attention of {queries} queries over {keys} keys does not fit the tokens of rank {state.rank} "
                f"({own}). {REMEDY}"
            )
        return fitting[0]


def _traced(
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
    """Attend in traced code, by one operator."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    scope = COMPILING.scopes[-1] if COMPILING.scopes else ""
    out_BLHD: Tensor = attention(q, k, v, attn_mask, scope, scale, None, enable_gqa, is_causal, False)
    return out_BLHD.transpose(1, 2)


_stock = F.scaled_dot_product_attention
_active: list[SharedAttention] = []


@contextmanager
def shared_attention(
    call: RunningCall, everyone: RankGroup, has_caches: Callable[[], object] = lambda: True
) -> Iterator[SharedAttention]:
    """Share attention while active: by a mode, or, where functions are compiled as they are called, in torch's namespace: behind a
    graph break the compiler mixes up arguments below a mode.

    `has_caches`: whether step caches are enabled, whose means only a mode sees. `everyone`: see `SharedAttention`.
    """
    shared = SharedAttention(call, everyone)
    _active.append(shared)
    try:
        with replaced_backends(_backend):
            if not frames_are_compiled() or has_caches():
                with shared:
                    yield shared
            else:
                before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _shared
                try:
                    yield shared
                finally:
                    F.scaled_dot_product_attention = before
    finally:
        _active.pop()


@cache
def _backend(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what stands in for a backend of diffusers: the same for the same one, as compiled code looks it up."""
    _functions[name] = function

    def attend(**given: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return _active[-1].attend_by(Backend(name, function, given))
        scope, grouped = COMPILING.scopes[-1] if COMPILING.scopes else "", given.get("enable_gqa", False)
        qkv, causal = (given["query"], given["key"], given["value"]), given.get("is_causal", False)
        out: Tensor = attention(*qkv, given.get("attn_mask"), f"{scope}@{name}", given.get("scale"), None, grouped, causal, False)
        return out

    return attend


_functions: dict[str, Callable[..., Tensor]] = {}


def _traced_backend(name: str, asked: Asked) -> Backend:
    """Return a backend that compiled code has asked for."""
    given = dict(
        query=asked.q, key=asked.k, value=asked.v, attn_mask=asked.mask, scale=asked.scale, is_causal=asked.low_precision,
        enable_gqa=asked.grouped,
    )  # fmt: skip
    taken = inspect.signature(_functions[name]).parameters
    return Backend(name, _functions[name], {each: value for each, value in given.items() if each in taken})


def _shared(*args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return _traced(*args, **kwargs)
    return _shared_now(*args, **kwargs)


@not_compiled
def _shared_now(*args: Any, **kwargs: Any) -> Tensor:
    return _active[-1].attend_once(*args, **kwargs)
