"""ControlNets on a rank: each computes this rank's tokens, or its items of the batch, before the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.controlnet import ControlBase, StrengthType
from torch import Tensor, nn

from ...engine.call import Planner
from ...engine.hooks import InstalledPlan
from ...engine.ranks.mesh import SequenceMesh
from ...engine.state import CallState
from ...errors import PlanError
from ...families import class_name
from ...families.controlnets import CONTROLNETS, ControlNetPlan
from .attention import attention_by_name, attention_override
from .patches import ATTACHED

Whole = Callable[[Tensor], Tensor]


class Residuals(dict[str, Sequence[Tensor | None]]):
    """Residuals by kind, each with this rank's tokens.

    Args:
        lengths: of these on every rank; empty = they are no tokens.
        whole: gathers the tokens of all ranks.
    """

    def __init__(self, kinds: Mapping[str, Sequence[Tensor | None]], lengths: Sequence[int], whole: Whole) -> None:
        super().__init__(kinds)
        self.lengths, self.whole = tuple(lengths), whole


def residuals_of(
    controlnets: Sequence[Mapping[str, Any]], mesh: SequenceMesh, planner: Planner, on_module: Callable[[], None] | None
) -> Residuals:
    """Compute a chain of ControlNets, as `ui.controlnets` has encoded it, for the ranks of a call."""
    merged: Any = None
    lengths: set[tuple[int, ...]] = set()
    for each in controlnets:
        out, found = _run(ATTACHED[each["key"]], each["arguments"], mesh, planner, on_module)
        lengths.add(found)
        settings: Any = SimpleNamespace(**{**each, "strength_type": StrengthType[each["strength_type"]]})
        merged = ControlBase.control_merge(settings, out, merged, None)
    if len(lengths) > 1:
        raise PlanError(f"ControlNets of one chain have different tokens: {sorted(lengths)}")
    (own,) = lengths
    return Residuals(merged, own, partial(_gathered, mesh, own))


def _run(
    patcher: Any, arguments: Mapping[str, Any], mesh: SequenceMesh, planner: Planner, on_module: Callable[[], None] | None
) -> tuple[Any, tuple[int, ...]]:
    """Return the residuals of one ControlNet, and the numbers of their tokens on all ranks."""
    network: nn.Module = patcher.model
    plan, weights = CONTROLNETS[class_name(network)], getattr(patcher, "cp_shards", None)
    if not hasattr(patcher, "cp_installed"):
        patcher.cp_installed = InstalledPlan(network, plan)
    installed: InstalledPlan[ControlNetPlan] = patcher.cp_installed
    with (
        _kept_hint(patcher),
        installed.call(mesh, planner, on_module, weights) as call,
        attention_by_name(plan.attention_names, attention_override(call)),
    ):
        out = installed.forward(network.forward, **arguments)
        state: CallState = call.state
        return out, tuple(state.layout((plan.stream,)).local_lengths) if plan.stream else ()


@contextmanager
def _kept_hint(patcher: Any) -> Iterator[None]:
    """Have the layers that only see the hint compute it once for all calls, while active: every rank needs all of it, and it is the
    same in every step."""
    block = getattr(patcher.model, "input_hint_block", None)
    if block is None:
        yield
        return

    def forward(hint: Tensor, *others: Any) -> Tensor:
        kept = getattr(patcher, "cp_hint", None)
        if kept is None or kept[0].dtype != hint.dtype or not torch.equal(kept[0], hint):
            kept = patcher.cp_hint = hint, type(block).forward(block, hint, *others)
        made: Tensor = kept[1].clone()  # the network may add to it in place
        return made

    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def _gathered(mesh: SequenceMesh, lengths: Sequence[int], residual: Tensor) -> Tensor:
    (whole,) = mesh.whole.all_gather([residual], lengths, 1)
    return whole
