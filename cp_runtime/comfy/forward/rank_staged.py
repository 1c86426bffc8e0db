"""One run of a ComfyUI model's own forward in stages, on this rank: the items of its batch follow each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.call import Planner, RunningCall
from ...engine.config import PipelineSettings
from ...engine.hooks import InstalledPlan
from ...engine.mesh import SequenceMesh
from ...engine.pipeline.pipeline import Part, Pipeline
from ...engine.state import CallState
from ...families.family import FamilyPlan
from ...nested import form_of, map_tensors, tensors
from .rank_batch import COND_KINDS, share_out, take_items
from .rank_sharded import run_sharded
from .wire_options import CONDITIONINGS

SHARED = ("control", "transformer_options")  # arguments that every run of a forward gets as they are


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
    on_run: Callable[[int], None] = lambda stages: None,
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

    several, state = shares.groups > 1 or settings.patches > 1, CallState(0, 1)

    def made(named: Mapping[str, Any]) -> Any:
        def run(mesh: SequenceMesh, kind: Callable[..., RunningCall]) -> Any:
            # Forwards may change what they are given. Residuals are copied as they are asked for.
            fresh = {name: value if name in SHARED else map_tensors(value, Tensor.clone) for name, value in named.items()}
            nonlocal state
            if several:
                on_run(settings.stages)
            out, state = run_sharded(installed, forward, fresh, mesh, planner, on_module, kind=kind)
            return out

        return run

    names = (arguments.get("transformer_options") or {}).get(CONDITIONINGS, [""])
    pipeline.begin_run(names[0].partition(" ")[0])
    outs = pipeline.call([Part(form, names, made(named)) for named, form, names in parts], mesh, settings)
    return together(outs), state


def _part(arguments: dict[str, Any], number: int) -> tuple[dict[str, Any], object, object]:
    """Return a part of a call without the names of its conditionings, a key of its form, and these names."""
    options = dict(arguments.get("transformer_options") or {})
    names = options.pop(CONDITIONINGS, number)
    named = {**arguments, "transformer_options": options}
    told = {name: value for name, value in options.items() if name != COND_KINDS}
    return named, form_of({**named, "transformer_options": told}), form_of(names)


def together(outs: list[Any]) -> Any:
    """Concatenate results along dimension 0: tensors, or lists and tuples of them."""
    if len(outs) == 1:
        return outs[0]
    parts = iter(zip(*map(tensors, outs), strict=True))
    return map_tensors(outs[0], lambda _: torch.cat(next(parts)))
