"""Qwen-Image, Edit and Layered."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, TokenIndex
from .family import FamilyPlan

JOINT = ("txt", "img")

BLOCK_INPUTS = {
    "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
    "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
    "image_rotary_emb": ContextParallelInput(split_dim=2, expected_dims=6, streams=JOINT, side=True),
    "encoder_hidden_states_mask": ContextParallelInput(split_dim=1, expected_dims=2, streams=("txt",), side=True),
}
OUTPUTS = {"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")}

QWEN_IMAGE = FamilyPlan(
    family="Qwen-Image",
    model_class="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={**BLOCK_INPUTS, "timestep_zero_index": TokenIndex(stream="img")}, attention=JOINT
        ),
    },
    outputs=OUTPUTS,
    control={"input": "img"},
)
