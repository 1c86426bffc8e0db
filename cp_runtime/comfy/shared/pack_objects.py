"""Object patches of node packs inside the transformer: other forwards of its modules, computed on the workers from plain data.

A pack's node replaces the forward of modules (`ModelPatcher.add_object_patch`) by functions of its own. OBJECTS lists those whose
source was read; the pack's code never runs on a rank. What they hold is checked and sent; `rank.pack_objects` computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import MirrorError

WAN = ("comfy.ldm.wan.",)


@dataclass(frozen=True, kw_only=True)
class ObjectPatch:
    """What stands in the place of a module's forward, or of a module.

    Args:
        node: id of the node that makes it.
        at: place in the transformer, where "*" is a number.
        fields: what it holds: name -> types. It holds nothing else.
        models: beginnings of the names of the modules whose transformers take it.
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
_OPTIMIZATION = "nodes.model_optimization_nodes:"
NAG = _OPTIMIZATION + "WanCrossAttentionPatch.__get__.<locals>.wrapped_attention"
ENHANCE = _OPTIMIZATION + "WanAttentionPatch.__get__.<locals>.wrapped_attention"
CHUNKS = _OPTIMIZATION + "WanffnChunkPatch.__get__.<locals>.wrapped_forward"
RIFLEX = "nodes.nodes:EmbedND_RifleX"
_ROPE = {"dim": (int,), "theta": NUMBER, "axes_dim": (list, tuple), "num_frames": (int,), "k": (int,)}
OBJECTS: Mapping[str, tuple[ObjectPatch, ...]] = {
    # KJNodes. The first half of a batch is guided, which is the whole one where it has one item: a rank must have it all.
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
"""`module in its pack:qualified name` of what is put there -> the places for it."""


def object_patch(name: str, path: str) -> ObjectPatch:
    """Return the object patch of that name for a place in the transformer. Raises MirrorError if it is not one for it."""
    place = ".".join("*" if part.isdecimal() else part for part in path.split("."))
    for patch in OBJECTS.get(name, ()):
        if patch.at == place:
            return patch
    raise MirrorError(f"{name} at {path} is not an object patch that the workers know")


def check_data(patch: ObjectPatch, data: Mapping[str, Any]) -> None:
    """Raise MirrorError where a patch does not hold what is known of it."""
    for field in patch.fields.keys() | data.keys():
        if field not in data or type(data[field]) not in (patch.fields.get(field, ())):
            held = type(data[field]).__name__ if field in data else "nothing"
            allowed = " or ".join(kind.__name__ for kind in patch.fields.get(field, ())) or "nothing"
            raise MirrorError(f"it holds {held} as {field}, and the workers know one with {allowed}")
