"""Object patches inside the transformer, in the UI process: check that the workers know them, and read them as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from comfy.ldm.flux.layers import EmbedND
from torch import Tensor, nn

from ...errors import MirrorError, UnsupportedError
from ..shared.pack_objects import RIFLEX, ObjectPatch, check_data, object_patch
from ..shared.weights import PREFIX
from .pack_nodes import made_by, name_in_pack

_STANDARD = frozenset(vars(nn.Module()))


def encode_objects(patcher: Any) -> tuple[dict[str, Any], list[ObjectPatch]]:
    """Return a ModelPatcher's object patches inside the transformer in wire form, empty if there are none, and what is known of
    each kind.

    Raises:
        UnsupportedError: the workers do not know one of them, or not with what it holds.
    """
    entries: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    known: dict[str, ObjectPatch] = {}
    seen: dict[Any, int] = {}
    for name, thing in patcher.object_patches.items():
        if name.split(".")[0] != PREFIX[:-1]:
            continue
        path = name.removeprefix(PREFIX)
        try:
            entry, patch = _encoded(path, thing, patcher)
        except MirrorError as error:
            node = made_by(thing)
            raise UnsupportedError(f"{node} replaced {name} of the model, which the workers do not repeat: {error}.") from error
        key = entry["name"], *((k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in sorted(entry["data"].items()))
        if key not in seen:
            seen[key] = len(entries)
            entries.append(entry)
        places[path], known[entry["name"]] = seen[key], patch
    return ({"entries": entries, "places": places} if places else {}), list(known.values())


def _encoded(path: str, thing: Any, patcher: Any) -> tuple[dict[str, Any], ObjectPatch]:
    function, model = getattr(thing, "__func__", thing), patcher.model.diffusion_model
    name = name_in_pack(function if hasattr(function, "__qualname__") else type(thing))
    patch = object_patch(name, path)
    if not type(model).__module__.startswith(patch.models):
        raise MirrorError(f"they know it for {' and '.join(patch.models)} only, and the model is of {type(model).__module__}")
    holder = thing
    if patch.held_by:
        held = {}
        if isinstance(function, FunctionType):
            held = dict(
                zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
            )
        if set(held) != {patch.held_by} or getattr(thing, "__self__", None) is not model.get_submodule(path.rpartition(".")[0]):
            raise MirrorError("it is not the function of one object, for the module in whose place it stands")
        holder = held[patch.held_by]
    data = {k: v for k, v in getattr(holder, "__dict__", {}).items() if not (isinstance(holder, nn.Module) and k in _STANDARD)}
    check_data(patch, data)
    if name == RIFLEX:
        _check_rotations(data, patcher.object_patches_backup.get(PREFIX + path, getattr(model, path, None)))
    return {"name": name, "data": data}, patch


def _check_rotations(data: Mapping[str, Any], stock: Any) -> None:
    """Raise MirrorError where more than one frequency of rotations differs from the model's own, or one that they do not have."""
    if not isinstance(stock, EmbedND):
        raise MirrorError(f"the model's rotations are of another kind ({type(stock).__name__})")
    if (list(data["axes_dim"]), data["theta"]) != (list(stock.axes_dim), stock.theta):
        raise MirrorError("it has other rotations than the model")
    if not (0 < data["k"] <= data["axes_dim"][0] // 2 and data["num_frames"] > 0):
        most = data["axes_dim"][0] // 2
        raise MirrorError(f"got k {data['k']} and {data['num_frames']} frames; allowed: k of 1 to {most}, at least one frame")
