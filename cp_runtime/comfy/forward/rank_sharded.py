"""One sharded run of a ComfyUI model's own forward on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.attention.opaque import serving
from ...engine.call import Planner, RunningCall
from ...engine.hooks import InstalledPlan
from ...engine.mesh import SequenceMesh
from ...engine.state import CallState
from ...engine.weights.sharded import ShardedWeights
from ...errors import PlanError
from ...families.family import FamilyPlan
from ..attention.rank import attention_by_name, attention_override, compiled_attention
from ..attention.wire import OPTION as ATTENTION
from ..attention.wire import attention_function
from ..patches.rank_nodes import decode_node_patches
from ..patches.wire_nodes import OPTION


def run_sharded(
    installed: InstalledPlan[FamilyPlan],
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    mesh: SequenceMesh,
    planner: Planner,
    on_module: Callable[[], None] | None = None,
    weights: ShardedWeights | None = None,
    kind: Callable[..., RunningCall] = RunningCall,
) -> tuple[Any, CallState]:
    """Call `forward`, a method of the model, with whole arguments by name. Return (whole output, state after the call).

    Args:
        mesh, planner, on_module, weights, kind: see `InstalledPlan.call`.
    """
    plan = installed.plan
    with installed.call(mesh, planner, on_module, weights, kind) as call:
        options = {**(arguments.get("transformer_options") or {})}
        chosen = options.pop(ATTENTION, None)
        options["optimized_attention_override"] = attention_override(call, chosen and attention_function(chosen))
        if OPTION in options:
            options |= decode_node_patches(options.pop(OPTION), call)
        named = {**arguments, "transformer_options": options}
        call.state.arguments = named
        if arguments.get("control") is not None:
            named["control"] = _local_control(arguments, call.state, plan)
        with attention_by_name(plan.attention_names, attention_override(call)), serving(compiled_attention(call)):
            return installed.forward(forward, **named), call.state


def _local_control(arguments: Mapping[str, Any], state: CallState, plan: FamilyPlan) -> dict[str, Any]:
    """Return the ControlNet residuals for this rank's forward. They may lie in memory shared with other processes."""
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    local: dict[str, Any] = {}
    for kind, residuals in arguments["control"].items():
        streams = plan.control.get(kind) if plan.shares_sequence else None
        if streams:
            local[kind] = LocalResiduals(residuals, state, (streams,) if isinstance(streams, str) else streams, device)
        else:
            local[kind] = [_copied(r, device) if isinstance(r, Tensor) else r for r in residuals]
    return local


def _copied(residual: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. That is asynchronous from pinned memory; from any other it makes the host wait."""
    if device.type != "cpu":
        return residual.pin_memory().to(device, non_blocking=True)
    return residual.to(device, copy=True)


class LocalResiduals(Sequence[Tensor | None]):
    """ControlNet residuals `[B, tokens, D]`. A rank's part is copied to its device when the forward asks for it.

    Args:
        residuals: of every block, over the first tokens of the streams (reference tokens behind them get none). Blocks may share
            one, which is copied once.
        state: of the running call; by the time a residual is asked for, the streams are known.
        streams: streams that they are added to, in joint order; once these are gathered, the whole residual is.
        device: of this rank.
    """

    def __init__(
        self, residuals: Sequence[Tensor | None], state: CallState, streams: tuple[str, ...], device: torch.device
    ) -> None:
        self._residuals, self._state, self._streams, self._device = list(residuals), state, streams, device
        self._due = Counter(residual.data_ptr() for residual in residuals if residual is not None)
        self._copies: dict[tuple[int, bool], Tensor] = {}

    def __len__(self) -> int:
        return len(self._residuals)

    def __getitem__(self, index: Any) -> Any:
        return self._local(self._residuals[index])

    def pop(self) -> Any:
        """Remove and return the last one, as some forwards do."""
        return self._local(self._residuals.pop())

    def _local(self, residual: Tensor | None) -> Tensor | None:
        if residual is None:
            return None
        # Whole once the tokens are gathered, and before any are split: a patch may skip the first blocks.
        known = self._state.lengths.keys() >= set(self._streams)
        key, whole = residual.data_ptr(), not known or self._state.whole.issuperset(self._streams)
        local = self._copies.pop((key, whole), None)
        if local is None:
            local = _copied(residual if whole else self._take(residual), self._device)
        self._due[key] -= 1
        if self._due[key] > 0:
            self._copies[key, whole] = local
        return local

    def _take(self, residual: Tensor) -> Tensor:
        layout = self._state.layout(self._streams)
        segments = [segment for stream in layout.held[self._state.rank] for segment in stream]
        if len(segments) > 1 and residual.shape[1] != layout.total:
            raise PlanError(f"a ControlNet gave residuals for {residual.shape[1]} tokens, and this model has {layout.total}")
        parts = [residual[:, start:stop] for start, stop in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
