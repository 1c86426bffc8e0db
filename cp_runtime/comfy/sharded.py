"""One sharded run of a ComfyUI model's own forward on this rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..hooks import AppliedPlan
from ..plan import CallState, FamilyPlan
from .attention import attention_override


def run_sharded(
    applied: AppliedPlan, forward: Callable[..., Any], arguments: Mapping[str, Any], on_module: Callable[[], None] | None = None
) -> tuple[Any, CallState]:
    """Call `forward`, a method of the applied model, with whole `arguments` (by name). Returns (whole output, state).

    Args:
        on_module: called whenever a planned module is entered.
    """
    plan = applied.plan
    assert isinstance(plan, FamilyPlan)
    override = attention_override(applied)
    options = {**(arguments.get("transformer_options") or {}), "optimized_attention_override": override}
    with applied.call(on_module) as state, _attention_by_name(plan.attention_names, override):
        state.arguments = arguments
        named = {**arguments, "transformer_options": options}
        if arguments.get("control") is not None:
            named["control"] = {
                kind: LocalResiduals(residuals, state, plan.control[kind]) for kind, residuals in arguments["control"].items()
            }
        return applied.forward(forward, **named), state


class LocalResiduals(Sequence[Tensor | None]):
    """ControlNet residuals `[B, tokens, D]` of a stream. A rank's part is taken when the forward asks for it.

    Args:
        residuals: of every block, over the first tokens of the stream (reference tokens behind them get none).
        state: of the running call; the stream is known by the time a residual is asked for.
        stream: whose tokens they are added to.
    """

    def __init__(self, residuals: Sequence[Tensor | None], state: CallState, stream: str) -> None:
        self._residuals, self._state, self._stream = residuals, state, stream

    def __len__(self) -> int:
        return len(self._residuals)

    def __getitem__(self, index: Any) -> Any:
        residual = self._residuals[index]
        if not isinstance(residual, Tensor):
            return residual
        start, stop = self._state.layout((self._stream,)).window(self._state.rank)
        return residual[:, start:stop]


@contextmanager
def _attention_by_name(names: Sequence[str], override: Callable[..., Tensor]) -> Iterator[None]:
    """Put `override` in the place of functions that modules call by name, without transformer_options."""
    replaced = []
    try:
        for name in names:
            module, _, function = name.rpartition(".")
            owner = importlib.import_module(module)
            original = getattr(owner, function)
            replaced.append((owner, function, original))
            setattr(owner, function, partial(override, original))
        yield
    finally:
        for owner, function, original in replaced:
            setattr(owner, function, original)
