"""ControlNets that ranks compute, each for its own tokens, or for its items of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.plan import ModulePlan, ShardingPlan
from . import flux, hydit, joint
from .family import tokens


@dataclass(frozen=True, kw_only=True)
class ControlNetPlan(ShardingPlan):
    """The sharding of one class of ComfyUI's ControlNets. Residuals stay on the rank that has their tokens.

    Args:
        model_class: full name of the module class.
        stream: of the residuals' tokens; "" = they are no tokens.
        attention_names: see `FamilyPlan`; ControlNets call blocks without transformer_options.
    """

    model_class: str
    stream: str = ""
    attention_names: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        return f"the plan of {self.model_class.rpartition('.')[2]}"

    @property
    def remedy(self) -> str:
        return "Update this extension."


FLUX = ControlNetPlan(
    model_class="comfy.ldm.flux.controlnet.ControlNetFlux",
    modules=flux.BLOCKS,
    outputs={},
    stream="img",
    attention_names=("comfy.ldm.flux.math.optimized_attention",),
)
SD3 = ControlNetPlan(
    model_class="comfy.cldm.mmdit.ControlNet",
    modules=joint.SD3.modules,
    outputs={},
    attention=joint.SD3.attention,
    stream="img",
    attention_names=("comfy.ldm.modules.diffusionmodules.mmdit.optimized_attention",),
)
SD35 = ControlNetPlan(
    model_class="comfy.cldm.dit_embedder.ControlNetEmbedder",
    modules={"transformer_blocks.*": ModulePlan(inputs={"x": tokens("img")}, attention=("img",))},
    outputs={},
    stream="img",
    attention_names=SD3.attention_names,
)
QWEN_IMAGE = ControlNetPlan(
    model_class="comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel",
    modules=joint.QWEN_IMAGE.modules,
    outputs={},
    stream="img",
    attention_names=("comfy.ldm.qwen_image.model.optimized_attention_masked",),
)
HUNYUAN_DIT = ControlNetPlan(
    model_class="comfy.ldm.hydit.controlnet.HunYuanControlNet",
    modules=hydit.HUNYUAN_DIT.modules,
    outputs={},
    stream="img",
    attention_names=hydit.HUNYUAN_DIT.attention_names,
)
UNET = ControlNetPlan(
    model_class="comfy.cldm.cldm.ControlNet",
    modules={"input_blocks.*.*": ModulePlan(), "middle_block.*": ModulePlan()},  # where a call can be cancelled
    outputs={},
)
CONTROLNETS: Mapping[str, ControlNetPlan] = {plan.model_class: plan for plan in (FLUX, SD3, SD35, QWEN_IMAGE, HUNYUAN_DIT, UNET)}
"""By the class of the network; ComfyUI's process computes all others."""
