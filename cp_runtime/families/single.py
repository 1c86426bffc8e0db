"""One kind of block, and one stream of tokens: everything else that is attended to is whole on every rank.

In some of these the stream is image and text together; in the others the text is outside of it, with cross-attention.
"""

from collections.abc import Mapping
from typing import Any

from ..engine.plan import ModulePlan
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

ALL, IMAGE, AUDIO = ("all",), ("img",), ("audio",)

ERNIE_IMAGE = FamilyPlan(
    family="ERNIE-Image",
    model_class="comfy.ldm.ernie.model.ErnieImageModel",
    modules={
        "layers.*": ModulePlan(
            inputs={"x": tokens("tokens"), "rotary_pos_emb": side("tokens", dim=1, dims=6)}, attention=("tokens",)
        )
    },
    outputs={"final_linear": gathered("tokens")},
    attention_names=("comfy.ldm.ernie.model.optimized_attention",),
)
# Masked by segments.
IDEOGRAM4 = FamilyPlan(
    family="Ideogram 4",
    model_class="comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
    modules={"layers.*": ModulePlan(inputs={"x": tokens(ALL), "freqs_cis": side(ALL, dim=1, dims=6)}, attention=ALL)},
    outputs={"final_layer": gathered("all")},
)
# With in-context references.
KREA2 = FamilyPlan(
    family="Krea 2",
    model_class="comfy.ldm.krea2.model.SingleStreamDiT",
    modules={
        "blocks.*": ModulePlan(
            inputs={"x": tokens(ALL), "freqs": side(ALL, dim=2, dims=6), "timestep_zero_index": TokenRanges(streams=("all",))},
            attention=ALL,
        ),
    },
    outputs={"last": gathered("all")},
)
PIXART = FamilyPlan(
    family="PixArt",
    model_class="comfy.ldm.pixart.pixartms.PixArtMS",
    modules={"blocks.*": ModulePlan(inputs={"x": tokens(IMAGE)}, attention=IMAGE, local=("cross_attn",))},
    outputs={"final_layer": gathered("img")},
    attention_names=("comfy.ldm.pixart.blocks.optimized_attention",),
)
KANDINSKY5 = FamilyPlan(
    family="Kandinsky 5",
    model_class="comfy.ldm.kandinsky5.model.Kandinsky5",
    modules={
        "visual_transformer_blocks.*": ModulePlan(
            inputs={"visual_embed": tokens("visual"), "freqs": side("visual", dim=1, dims=6)},
            attention=("visual",),
            local=("cross_attention",),
        ),
    },
    # The output layer takes frames, rows and columns.
    outputs={"visual_transformer_blocks.-1": gathered("visual")},
)


def _is_one_pair(items: int, options: Mapping[str, Any]) -> bool:
    """Return whether a call consists of the two halves of CFG of a single latent."""
    kinds = options.get("cond_or_uncond", ())
    return items == len(kinds) == len(set(kinds)) == 2


HUNYUAN_3D_21 = FamilyPlan(
    family="Hunyuan3D 2.1",
    model_class="comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
    modules={"blocks.*": ModulePlan(inputs={"hidden_states": tokens("shape")}, attention=("shape",), local=("attn2",))},
    # Behind it the final layer drops the first token, which carries the timestep.
    outputs={"final_layer.norm_final": gathered("shape")},
    attention_names=("comfy.ldm.hunyuan3dv2_1.hunyuandit.optimized_attention",),
    # It swaps the halves of two or more texts, and of its output: an item that it computes alone is right only where the other half
    # has the same latent. So a group may have one item, a CFG half, and none may have two.
    shares_batch=lambda arguments: _is_one_pair(arguments["x"].shape[0], arguments.get("transformer_options") or {}),
)
TRANSFORMER = "diffusion_transformer.transformer"
MINIMAX_MUSIC = FamilyPlan(
    family="MiniMax Music 3",
    model_class="comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT",
    since="0.33.0",
    modules={
        TRANSFORMER: ModulePlan(separate=True),  # windows of a song one after the other, each with separate tokens
        f"{TRANSFORMER}.layers.*": ModulePlan(
            inputs={"x": tokens(AUDIO), "rotation_matrix": side(AUDIO, dim=2, dims=6)}, attention=AUDIO
        ),
    },
    # Before the token for the time is cut off.
    outputs={f"{TRANSFORMER}.layers.-1": gathered("audio")},
    attention_names=("comfy.ldm.minimax_music.dit.optimized_attention_for_device()",),
)
