"""Mage-Flow, also with reference images: Qwen-Image's blocks without a second timestep."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan
from .qwen_image import BLOCK_INPUTS, JOINT, OUTPUTS

MAGE_FLOW = FamilyPlan(
    family="Mage-Flow",
    model_class="comfy.ldm.mage_flow.model.MageFlowTransformer2DModel",
    modules={"transformer_blocks.*": ModulePlan(inputs=BLOCK_INPUTS, attention=JOINT)},
    outputs=OUTPUTS,
    control={"input": "img"},
)
