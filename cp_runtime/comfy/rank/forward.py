"""One run of a ComfyUI model's forward on this rank, sharded or in stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...engine.attention.opaque import serving
from ...engine.call import Planner, RunningCall
from ...engine.hooks import InstalledPlan
from ...engine.pipeline.pipeline import Part, Pipeline
from ...engine.ranks.config import PipelineSettings
from ...engine.ranks.mesh import SequenceMesh
from ...engine.state import CallState
from ...engine.weights.sharded import ShardedWeights
from ...errors import PlanError
from ...families.family import FamilyPlan
from ...nested import form_of, map_tensors, tensors
from ..shared.attention import attention_function
from ..shared.forward import ATTENTION, CONDITIONINGS, CONTROLNETS, LAYERS, PATCHES, SPARSE
from .attention import attention_by_name, attention_override, compiled_attention
from .batch import COND_KINDS, share_out, take_items
from .layers import functions_of
from .sparse import SparseAttention

if TYPE_CHECKING:
    from .controlnets import Residuals
    from .patches import CallPatches

SHARED = ("control", "transformer_options")  # arguments that every run of a forward gets unchanged


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

    For the other arguments see `InstalledPlan.call`.
    """
    plan = installed.plan
    arguments, residuals = dict(arguments), None
    if (controlnets := arguments.pop(CONTROLNETS, None)) is not None:
        from .controlnets import residuals_of  # which needs ComfyUI, as what follows

        residuals = residuals_of(controlnets, mesh, planner, on_module)
    with installed.call(mesh, planner, on_module, weights, kind) as call:
        options = {**(arguments.get("transformer_options") or {})}
        chosen, layers = options.pop(ATTENTION, None), options.pop(LAYERS, ())
        sparse = SparseAttention(options.pop(SPARSE), call) if SPARSE in options else None
        call.in_joint_order = bool(layers) or sparse is not None
        options["optimized_attention_override"] = attention_override(call, chosen and attention_function(chosen), sparse)
        if layers:
            functions = functions_of(installed.model, layers)
            options[LAYERS] = {name: attention_override(call, function) for name, function in functions.items()}
        override = attention_override(call)
        patches: CallPatches | None = None
        in_place: AbstractContextManager[None] = nullcontext()
        names = frozenset(plan.attention_names)
        if PATCHES in options:
            from .patches import read_patches  # which needs ComfyUI; the rest of this file does not

            device = next(tensors(list(arguments.values()))).device
            patches = read_patches(options.pop(PATCHES), installed.model, call, device)
            options |= patches.options
            in_place, names = patches.in_place(installed.model, call, options), names | patches.attention_names
        named = {**arguments, "transformer_options": options}
        call.state.arguments = named
        if residuals is not None:
            named["control"] = _own_control(residuals, call.state, plan)
        elif arguments.get("control") is not None:
            named["control"] = _local_control(arguments, call.state, plan)
        gates = nullcontext() if sparse is None else sparse.gates(installed.model)
        with in_place, gates, attention_by_name(names, override), serving(compiled_attention(call)):
            if patches is not None:
                forward, call.state.noted = patches.forward(forward, installed.model), patches.notes
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


def _own_control(residuals: Residuals, state: CallState, plan: FamilyPlan) -> dict[str, Any]:
    """Return the residuals that this rank has computed, for its forward."""
    own: dict[str, Any] = {}
    for kind, each in residuals.items():
        if kind not in plan.control and any(residual is not None for residual in each):
            takes = ", ".join(plan.control) or "none"
            raise PlanError(f"a ControlNet gave residuals of kind {kind}, and {plan.family} takes {takes}")
        streams = plan.control.get(kind) if plan.shares_sequence else None
        if streams and residuals.lengths:
            own[kind] = OwnResiduals(each, state, (streams,) if isinstance(streams, str) else streams, residuals)
        else:
            own[kind] = list(each)
    return own


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
        state: of the running call; the streams are known before the first residual is read.
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
        whole = self._is_whole()
        key = residual.data_ptr()
        local = self._copies.pop((key, whole), None)
        if local is None:
            local = _copied(residual if whole else self._take(residual), self._device)
        self._due[key] -= 1
        if self._due[key] > 0:
            self._copies[key, whole] = local
        return local

    def _is_whole(self) -> bool:
        """Whether the forward adds to all tokens now: once they are gathered, and before any are split, as a patch may skip the
        first blocks."""
        known = self._state.lengths.keys() >= set(self._streams)
        return self._state.on_all or not known or self._state.whole.issuperset(self._streams)

    def _take(self, residual: Tensor) -> Tensor:
        layout = self._state.layout(self._streams)
        segments = [segment for stream in layout.held[self._state.rank] for segment in stream]
        if len(segments) > 1 and residual.shape[1] != layout.total:
            raise PlanError(f"a ControlNet gave residuals for {residual.shape[1]} tokens, and this model has {layout.total}")
        parts = [residual[:, start:stop] for start, stop in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class OwnResiduals(LocalResiduals):
    """ControlNet residuals that this rank has computed for its tokens. They are gathered where the forward adds to all tokens, or
    has further ones, such as those of a reference."""

    def __init__(self, own: Sequence[Tensor | None], state: CallState, streams: tuple[str, ...], residuals: Residuals) -> None:
        self._residuals, self._state, self._streams, self._all = list(own), state, streams, residuals

    def _local(self, residual: Tensor | None) -> Tensor | None:
        if residual is None:
            return None
        if self._is_whole():
            return self._all.whole(residual)
        if tuple(self._state.layout(self._streams).local_lengths) == self._all.lengths:
            return residual
        return self._take(self._all.whole(residual))


def run_staged(
    installed: InstalledPlan[FamilyPlan],
    pipeline: Pipeline,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    mesh: SequenceMesh,
    planner: Planner,
    settings: PipelineSettings,
    leading: Collection[str],
    apart: bool,
    on_module: Callable[[], None] | None = None,
    on_run: Callable[[], bool] = lambda: True,
) -> tuple[Any, CallState]:
    """Call `forward` with whole arguments by name, as `run_sharded` does, item by item of the batch if these are apart.

    Args:
        mesh: the ranks of this stage that share the tokens.
        leading: names of the latent and the timestep.
        apart: items are independent.
        on_module, on_run: see `Mirrors.call`.

    Returns:
        the whole output, right on the last stage, and the state after the last run.
    """
    items = next(value.shape[0] for name in leading for value in tensors(arguments[name]))
    most = items if apart else 1
    shares = share_out(arguments, leading, most, most, sequence=True)
    parts = [_part(take_items(shares, arguments, number), number) for number in range(shares.groups)]

    several, follows, state = shares.groups > 1 or settings.patches > 1, False, CallState(0, 1)
    # Never at modules: a stage enters those of its own blocks, so their numbers say nothing to another one.

    def made(named: Mapping[str, Any]) -> Any:
        def run(mesh: SequenceMesh, kind: Callable[..., RunningCall]) -> Any:
            # Forwards may modify their arguments. Residuals are copied when they are read.
            fresh = {name: value if name in SHARED else map_tensors(value, Tensor.clone) for name, value in named.items()}
            nonlocal state, follows
            follows = on_run() and several
            out, state = run_sharded(installed, forward, fresh, mesh, planner, on_module, kind=kind)
            return out

        return run

    names = (arguments.get("transformer_options") or {}).get(CONDITIONINGS, [""])
    pipeline.begin_run(names[0].partition(" ")[0])
    outs = pipeline.call([Part(form, names, made(named)) for named, form, names in parts], mesh, settings, lambda: follows)
    return together(outs), state


def _part(arguments: dict[str, Any], number: int) -> tuple[dict[str, Any], object, object]:
    """Return a part of a call without the names of its conditionings, a key of its form, and these names."""
    options = dict(arguments.get("transformer_options") or {})
    names = options.pop(CONDITIONINGS, number)
    named = {**arguments, "transformer_options": options}
    told = {name: value for name, value in options.items() if name != COND_KINDS}
    return named, form_of({**named, "transformer_options": told}), form_of(names)


def together(outs: list[Any]) -> Any:
    if len(outs) == 1:
        return outs[0]
    parts = iter(zip(*map(tensors, outs), strict=True))
    return map_tensors(outs[0], lambda _: torch.cat(next(parts)))
