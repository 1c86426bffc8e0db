"""Hunyuan3D 2 and 2.1."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, tokens
from .flux import BLOCKS

HUNYUAN_3D_2 = FamilyPlan(
    family="Hunyuan3D 2",
    model_class="comfy.ldm.hunyuan3d.model.Hunyuan3Dv2",
    modules=BLOCKS,
    outputs={"final_layer": gathered("img")},
)
HUNYUAN_3D_21 = FamilyPlan(
    family="Hunyuan3D 2.1",
    model_class="comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
    modules={"blocks.*": ModulePlan(inputs={"hidden_states": tokens("shape")}, attention=("shape",), local=("attn2",))},
    # Behind it the final layer drops the first token, which carries the timestep.
    outputs={"final_layer.norm_final": gathered("shape")},
    attention_names=("comfy.ldm.hunyuan3dv2_1.hunyuandit.optimized_attention",),
    # It swaps the halves of the text and of what it returns: with CFG, where both halves have the same latent, each is its own.
    shares_batch=lambda arguments: len(set((arguments.get("transformer_options") or {}).get("cond_or_uncond", ()))) == 2,
)
