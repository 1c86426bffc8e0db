"""UNets (Stable Diffusion 1.5, 2, XL, Stable Video Diffusion and others) and Stable Cascade: only a batch can be shared."""

from dataclasses import replace

from ..engine.plan import ModulePlan
from .family import FamilyPlan

UNET = FamilyPlan(
    family="Stable Diffusion UNet",
    model_class="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    # Where a call can be cancelled. The forward calls the layers of the blocks, not the blocks.
    modules={"input_blocks.*.*": ModulePlan(), "middle_block.*": ModulePlan(), "output_blocks.*.*": ModulePlan()},
    outputs={},
    control={"input": None, "middle": None, "output": None},
)
STAGE_C = FamilyPlan(
    family="Stable Cascade C",
    model_class="comfy.ldm.cascade.stage_c.StageC",
    modules={"down_blocks.*.*": ModulePlan(), "up_blocks.*.*": ModulePlan()},  # where a call can be cancelled
    outputs={},
    control={"input": None},
)
STAGE_B = replace(STAGE_C, family="Stable Cascade B", model_class="comfy.ldm.cascade.stage_b.StageB", control={})
