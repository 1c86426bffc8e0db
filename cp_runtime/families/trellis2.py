"""TRELLIS 2 and Pixal3D: a dense grid for the structure, then the voxels that it has, for the shape and its texture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side, tokens

VOXELS, GRID = ("voxels",), ("grid",)
WHOLE = "cp_whole"  # where a sparse tensor, and what is derived from it, keeps the one that it is a part of


def counts(state: CallState) -> tuple[int, ...]:
    """Return the number of voxels of each item."""
    items, _, longest, _ = state.arguments["x"].shape
    given = state.arguments.get("trellis2_coord_counts")
    # Asking for them makes the host wait for the device.
    own: list[int] = [longest] if given is None else state.once(counts, given, given.tolist)
    copies: int = items // len(own)
    return (*own,) * copies


def held(state: CallState) -> list[tuple[int, int]]:
    """Return (start, stop) of this rank's voxels of each item, where items lie behind each other.

    The stream has as many voxels as the longest item, so that a rank has the same ones of every item, or fewer of shorter ones.
    """
    low, high = state.layout(VOXELS).window(state.rank)
    items = pairwise(accumulate(counts(state), initial=0))
    return [(min(first + low, end), min(first + high, end)) for first, end in items]


def taken(state: CallState, value: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that has one for each voxel."""
    return torch.cat([value[start:stop] for start, stop in held(state)])


@dataclass(frozen=True)
class Voxels:
    """Split a `SparseTensor`, voxels of all items behind each other."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        each = counts(state)
        state.define("voxels", max(each))
        if min(each) < max(each):
            hidden = torch.arange(max(each)) >= torch.tensor(each)[:, None, None, None]
            lowest = torch.finfo(value.dtype).min
            state.padding[VOXELS] = torch.zeros(hidden.shape, dtype=value.dtype).masked_fill_(hidden, lowest).to(value.device)
        feats, coords = taken(state, value.feats), taken(state, value.coords)
        local = type(value)(feats=feats, coords=coords, shape=value.shape)
        ends = accumulate((stop - start for start, stop in held(state)), initial=0)
        local.register_spatial_cache("layout", [slice(*part) for part in pairwise(ends)])
        local.register_spatial_cache(WHOLE, value)
        return local


@dataclass(frozen=True)
class AllVoxels:
    """Gather what was computed of `Voxels`."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        padded = pad_sequence([value.feats[part] for part in value.layout], batch_first=True)
        whole = state.gather(padded, "voxels", 1)
        feats = torch.cat([item[:count] for item, count in zip(whole, counts(state), strict=True)])
        return value.get_spatial_cache(WHOLE).replace(feats)


@dataclass(frozen=True)
class Projected:
    """Split what Pixal3D projects onto each voxel, or onto each place of the grid; the text and whole images stay as they are."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: part if name == "global" else self._local(state, part, where) for name, part in value.items()}

    def _local(self, state: CallState, value: Tensor, where: str) -> Any:
        if state.knows(GRID):
            return side("grid", dim=1, dims=3)(state, value, where)
        return state.once(self, value, lambda: taken(state, value))


def _of_voxels(model: str) -> dict[str, ModulePlan]:
    return {
        f"{model}?": ModulePlan(inputs={"x": Voxels()}, outputs={0: AllVoxels()}),
        f"{model}?.blocks.*": ModulePlan(inputs={"context": Projected()}, attention=VOXELS, local=("cross_attn",)),
    }


def shares_batch(arguments: Mapping[str, Any]) -> bool:
    """Return whether items are independent: of one object, whose description each of them takes.

    A description of several objects comes whole, whatever items a rank computes. And which items are without what Pixal3D
    projects, the model finds by their place among the kinds of conditions.
    """
    each, projected = arguments.get("trellis2_coord_counts"), arguments.get("trellis2_proj_feats")
    described = projected if each is None else each
    if described is None:
        return True
    kinds = (arguments.get("transformer_options") or {}).get("cond_or_uncond", ())
    return len(described) == 1 and (projected is None or arguments["x"].shape[0] == len(kinds) <= 2)


TRELLIS_2 = FamilyPlan(
    family="TRELLIS 2",
    model_class="comfy.ldm.trellis2.model.Trellis2",
    since="0.33.0",
    shares_batch=shares_batch,
    modules={
        **_of_voxels("img2shape_512"),
        **_of_voxels("img2shape"),
        **_of_voxels("shape2txt"),
        "structure_model?.blocks.*": ModulePlan(
            inputs={"x": tokens(GRID), "phases": side(GRID, dim=0, dims=4), "context": Projected()},
            attention=GRID,
            local=("cross_attn",),
        ),
    },
    outputs={"structure_model?.out_layer": gathered("grid")},
)
