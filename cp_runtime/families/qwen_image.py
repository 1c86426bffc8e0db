"""Qwen-Image, Edit and Layered; and Mage-Flow, which has its blocks without a second timestep."""

from ..engine.plan import ModulePlan
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("txt", "img")
BLOCK_INPUTS = {
    "encoder_hidden_states": tokens("txt"),
    "hidden_states": tokens("img"),
    "image_rotary_emb": side(JOINT, dim=2, dims=6),
    "encoder_hidden_states_mask": side("txt", dim=1, dims=2),
}
OUTPUTS = {"proj_out": gathered("img")}

QWEN_IMAGE = FamilyPlan(
    family="Qwen-Image",
    model_class="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={**BLOCK_INPUTS, "timestep_zero_index": TokenRanges(streams=("img",))}, attention=JOINT
        ),
    },
    outputs=OUTPUTS,
    control={"input": "img"},
)
MAGE_FLOW = FamilyPlan(
    family="Mage-Flow",
    model_class="comfy.ldm.mage_flow.model.MageFlowTransformer2DModel",
    modules={"transformer_blocks.*": ModulePlan(inputs=BLOCK_INPUTS, attention=JOINT)},
    outputs=OUTPUTS,
    control={"input": "img"},
)
