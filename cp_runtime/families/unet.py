"""The UNets of Stable Diffusion 1.5, 2, XL, Stable Video Diffusion and others: no sequence to share, but a batch."""

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
