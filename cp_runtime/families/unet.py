"""The UNets of Stable Diffusion 1.5, 2, XL, Stable Video Diffusion and others: no sequence to share, but a batch."""

from ..plan import FamilyPlan, ModulePlan

UNET = FamilyPlan(
    family="Stable Diffusion UNet",
    model_class="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    modules={"input_blocks.*": ModulePlan(), "output_blocks.*": ModulePlan()},  # where a call can be cancelled
    outputs={},
    control={"input": None, "middle": None, "output": None},
)
