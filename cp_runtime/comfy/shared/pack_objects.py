"""Object patches of node packs that ranks may compute on their tokens: other forwards of the transformer's modules, or modules.

OBJECTS lists those whose source was read. Ranks get them by value, and their code from the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WAN = ("comfy.ldm.wan.",)


@dataclass(frozen=True, kw_only=True)
class ObjectPatch:
    """A replacement for a module's forward, or for a module.

    Args:
        node: id of the node that makes it.
        at: path in the transformer, where "*" is a number.
        models: prefixes of the module names of the transformers that take it.
        helper: function of its module, which ranks compute together: see `rank.pack_objects`.
        mixes_batch: it needs all items of a batch.
        all_tokens: it needs all tokens at once.
        by_conditioning: it needs all items of a conditioning.
    """

    node: str
    at: str
    models: tuple[str, ...] = WAN
    helper: str = ""
    mixes_batch: bool = False
    all_tokens: bool = False
    by_conditioning: bool = False


_WRAPPED = "nodes.model_optimization_nodes:{}.__get__.<locals>.{}"
OBJECTS: Mapping[str, tuple[ObjectPatch, ...]] = {
    # KJNodes. The first half of a batch is guided, or all of a single item: a rank must have the whole batch.
    _WRAPPED.format("WanCrossAttentionPatch", "wrapped_attention"): (
        ObjectPatch(node="WanVideoNAG", at="blocks.*.cross_attn.forward", mixes_batch=True),
    ),
    _WRAPPED.format("WanAttentionPatch", "wrapped_attention"): (
        ObjectPatch(
            node="WanVideoEnhanceAVideoKJ",
            at="blocks.*.self_attn.forward",
            helper="get_feta_scores",
            mixes_batch=True,
            all_tokens=True,
        ),
    ),
    _WRAPPED.format("WanffnChunkPatch", "wrapped_forward"): (ObjectPatch(node="WanChunkFeedForward", at="blocks.*.ffn.forward"),),
    "nodes.nodes:EmbedND_RifleX": (
        ObjectPatch(node="ApplyRifleXRoPE_WanVideo", at="rope_embedder"),
        ObjectPatch(node="ApplyRifleXRoPE_HunuyanVideo", at="pe_embedder", models=("comfy.ldm.hunyuan_video.", "comfy.ldm.flux.")),
    ),
}
"""`module in its pack:qualified name` of a replacement -> its possible paths."""

UNLISTED_OBJECT = ObjectPatch(node="", at="", by_conditioning=True)
"""An object patch that OBJECTS does not have, of a model whose tokens are not split: see `patches.UNLISTED`."""
