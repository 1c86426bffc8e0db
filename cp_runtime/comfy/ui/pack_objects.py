"""Object patches of node packs inside the transformer: other forwards of its modules, computed on the workers from plain data.

A pack's node replaces the forward of modules (`ModelPatcher.add_object_patch`) by functions. OBJECTS lists those whose source was
read; the pack's code never runs on a rank. Their data is checked and sent; `rank.pack_objects` computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from comfy.ldm.flux.layers import EmbedND
from torch import Tensor, nn

from ...errors import MirrorError, UnsupportedError
from ..shared.pack_objects import CHUNKS, ENHANCE, NAG, RIFLEX
from ..shared.weights import PREFIX
from .objects import STANDARD
from .pack_nodes import made_by, name_in_pack

WAN = ("comfy.ldm.wan.",)


@dataclass(frozen=True, kw_only=True)
class ObjectPatch:
    """A replacement for a module's forward, or for a module.

    Args:
        node: id of the node that makes it.
        at: path in the transformer, where "*" is a number.
        fields: all its data: name -> types.
        models: prefixes of the module names of the transformers that take it.
        held_by: variable of the function that holds the object with the fields; "" = it is the object.
        mixes_batch: it needs all items of a batch.
        all_tokens: it needs all tokens at once.
    """

    node: str
    at: str
    fields: Mapping[str, tuple[type, ...]]
    models: tuple[str, ...] = WAN
    held_by: str = "self"
    mixes_batch: bool = False
    all_tokens: bool = False


NUMBER = (int, float)
_ROPE = {"dim": (int,), "theta": NUMBER, "axes_dim": (list, tuple), "num_frames": (int,), "k": (int,)}
OBJECTS: Mapping[str, tuple[ObjectPatch, ...]] = {
    # KJNodes. The first half of a batch is guided, or all of a single item: a rank must have the whole batch.
    NAG: (
        ObjectPatch(
            node="WanVideoNAG",
            at="blocks.*.cross_attn.forward",
            fields={
                "nag_context": (Tensor,),
                "nag_scale": NUMBER,
                "nag_alpha": NUMBER,
                "nag_tau": NUMBER,
                "i2v": (bool,),
                "input_type": (str,),
                "inplace": (bool,),
            },
            mixes_batch=True,
        ),
    ),
    ENHANCE: (
        ObjectPatch(
            node="WanVideoEnhanceAVideoKJ",
            at="blocks.*.self_attn.forward",
            fields={"num_frames": (int,), "enhance_weight": NUMBER},
            mixes_batch=True,
            all_tokens=True,
        ),
    ),
    CHUNKS: (
        ObjectPatch(node="WanChunkFeedForward", at="blocks.*.ffn.forward", fields={"num_chunks": (int,), "dim_threshold": (int,)}),
    ),
    RIFLEX: (
        ObjectPatch(node="ApplyRifleXRoPE_WanVideo", at="rope_embedder", fields=_ROPE, held_by=""),
        ObjectPatch(
            node="ApplyRifleXRoPE_HunuyanVideo",
            at="pe_embedder",
            fields=_ROPE,
            models=("comfy.ldm.hunyuan_video.", "comfy.ldm.flux."),
            held_by="",
        ),
    ),
}
"""`module in its pack:qualified name` of a replacement -> its possible paths."""


def encode_objects(patcher: Any) -> tuple[dict[str, Any], list[ObjectPatch]]:
    """Return a ModelPatcher's object patches inside the transformer in wire form, and their entries in OBJECTS; both may be empty.
    Raises UnsupportedError if the workers do not know one of them, or not with its data."""
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
    patch = _object_patch(name, path)
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
    data = {k: v for k, v in getattr(holder, "__dict__", {}).items() if not (isinstance(holder, nn.Module) and k in STANDARD)}
    _check_data(patch, data)
    if name == RIFLEX:
        _check_rotations(data, patcher.object_patches_backup.get(PREFIX + path, getattr(model, path, None)))
    return {"name": name, "data": data}, patch


def _check_rotations(data: Mapping[str, Any], stock: Any) -> None:
    """Raise MirrorError if more than one frequency of rotations differs from the model's, or one that they do not have."""
    if not isinstance(stock, EmbedND):
        raise MirrorError(f"the model's rotations are of another kind ({type(stock).__name__})")
    if (list(data["axes_dim"]), data["theta"]) != (list(stock.axes_dim), stock.theta):
        raise MirrorError("it has other rotations than the model")
    if not (0 < data["k"] <= data["axes_dim"][0] // 2 and data["num_frames"] > 0):
        most = data["axes_dim"][0] // 2
        raise MirrorError(f"got k {data['k']} and {data['num_frames']} frames; allowed: k of 1 to {most}, at least one frame")


def _object_patch(name: str, path: str) -> ObjectPatch:
    """Return the object patch of that name for a path in the transformer. Raises MirrorError if it is not one for it."""
    place = ".".join("*" if part.isdecimal() else part for part in path.split("."))
    for patch in OBJECTS.get(name, ()):
        if patch.at == place:
            return patch
    raise MirrorError(f"{name} at {path} is not an object patch that the workers know")


def _check_data(patch: ObjectPatch, data: Mapping[str, Any]) -> None:
    """Raise MirrorError if a patch's data differs from its known fields."""
    for field in patch.fields.keys() | data.keys():
        if field not in data or type(data[field]) not in (patch.fields.get(field, ())):
            held = type(data[field]).__name__ if field in data else "nothing"
            allowed = " or ".join(kind.__name__ for kind in patch.fields.get(field, ())) or "nothing"
            raise MirrorError(f"it holds {held} as {field}, and the workers know one with {allowed}")
