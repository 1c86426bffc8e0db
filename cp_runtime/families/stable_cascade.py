"""Stable Cascade: like the UNets, no sequence to share, but a batch."""

from dataclasses import replace

from ..engine.plan import ModulePlan
from .family import FamilyPlan

STAGE_C = FamilyPlan(
    family="Stable Cascade C",
    model_class="comfy.ldm.cascade.stage_c.StageC",
    modules={"down_blocks.*.*": ModulePlan(), "up_blocks.*.*": ModulePlan()},  # where a call can be cancelled
    outputs={},
    control={"input": None},
)
STAGE_B = replace(STAGE_C, family="Stable Cascade B", model_class="comfy.ldm.cascade.stage_b.StageB", control={})
