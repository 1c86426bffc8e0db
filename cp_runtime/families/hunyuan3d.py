"""Hunyuan3D 2 and 2.1."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan
from .flux import DOUBLE_BLOCK, SINGLE_BLOCK

SHAPE = ("shape",)

HUNYUAN_3D_2 = FamilyPlan(
    family="Hunyuan3D 2",
    model_class="comfy.ldm.hunyuan3d.model.Hunyuan3Dv2",
    modules={"double_blocks.*": DOUBLE_BLOCK, "single_blocks.*": SINGLE_BLOCK},
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
)
HUNYUAN_3D_21 = FamilyPlan(
    family="Hunyuan3D 2.1",
    model_class="comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
    modules={
        "blocks.*": ModulePlan(
            inputs={"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=SHAPE)},
            attention=SHAPE,
            local=("attn2",),
        ),
    },
    # Behind it the final layer drops the first token, which carries the timestep.
    outputs={"final_layer.norm_final": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="shape")},
    attention_names=("comfy.ldm.hunyuan3dv2_1.hunyuandit.optimized_attention",),
    # It swaps the halves of the text and of what it returns: with CFG, where both halves have the same latent, each is its own.
    shares_batch=lambda arguments: len(set((arguments.get("transformer_options") or {}).get("cond_or_uncond", ()))) == 2,
)
