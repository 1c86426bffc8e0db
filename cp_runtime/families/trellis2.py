"""TRELLIS 2 and Pixal3D: a dense grid for the structure, then its voxels, for the shape and its texture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side, tokens

VOXELS, GRID = ("voxels",), ("grid",)
WHOLE = "cp_whole"  # where a sparse tensor, and those derived from it, refer to the whole one


def held(state: CallState) -> list[tuple[int, int]]:
    """Return (start, stop) of this rank's voxels of each item, where items lie one after the other.

    The stream has as many voxels as the longest item, so that a rank has the same ones of every item, or fewer of shorter ones.
    """
    low, high = state.layout(VOXELS).window(state.rank)
    return [(min(item.start + low, item.stop), min(item.start + high, item.stop)) for item in state.kept[VOXELS]]


def taken(state: CallState, value: Tensor) -> Tensor:
    """Return this rank's rows of a tensor with one row per voxel."""
    return torch.cat([value[start:stop] for start, stop in held(state)])


def voxels(state: CallState, value: Any, where: str) -> Any:
    """Split a `SparseTensor`, which holds the voxels of all items, one item after the other."""
    state.kept[VOXELS] = value.layout  # slices; the model itself has the host wait for them
    longest, *shorter = sorted({item.stop - item.start for item in value.layout}, reverse=True)
    state.define("voxels", longest)
    if shorter:
        hidden = torch.arange(longest, device=value.device) >= value.seqlen[:, None, None, None]
        state.padding[VOXELS] = value.feats.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(value.dtype).min)
    local = type(value)(feats=taken(state, value.feats), coords=taken(state, value.coords), shape=value.shape)
    ends = accumulate((stop - start for start, stop in held(state)), initial=0)
    local.register_spatial_cache("layout", [slice(*part) for part in pairwise(ends)])
    local.register_spatial_cache(WHOLE, value)
    return local


def all_voxels(state: CallState, value: Any, where: str) -> Any:
    """Gather the results of `voxels`."""
    padded = pad_sequence([value.feats[item] for item in value.layout], batch_first=True)
    items, whole = state.gather(padded, "voxels", 1), value.get_spatial_cache(WHOLE)
    return whole.replace(torch.cat([own[: at.stop - at.start] for own, at in zip(items, whole.layout, strict=True)]))


def projected(state: CallState, value: Any, where: str) -> Any:
    """Split Pixal3D's projections onto voxels, or onto cells of the grid; the text and whole images stay as they are."""

    def local(part: Tensor) -> Any:
        if state.knows(GRID):
            return side("grid", dim=1, dims=3)(state, part, where)
        return state.once(projected, part, lambda: taken(state, part))

    if not isinstance(value, dict):
        return value
    return {name: part if name == "global" else local(part) for name, part in value.items()}


def _of_voxels(model: str) -> dict[str, ModulePlan]:
    return {
        f"{model}?": ModulePlan(inputs={"x": voxels}, outputs={0: all_voxels}),
        f"{model}?.blocks.*": ModulePlan(inputs={"context": projected}, attention=VOXELS, local=("cross_attn",)),
    }


def shares_batch(arguments: Mapping[str, Any]) -> bool:
    """Return whether items are independent: of one object, whose description each of them takes.

    A description of several objects comes whole, whatever items a rank computes. And the model finds the items without Pixal3D's
    projections by their position among the kinds of conditions.
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
            inputs={"x": tokens(GRID), "phases": side(GRID, dim=0, dims=4), "context": projected},
            attention=GRID,
            local=("cross_attn",),
        ),
    },
    outputs={"structure_model?.out_layer": gathered("grid")},
)
