"""HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1."""

from dataclasses import dataclass
from typing import Any

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

# A reference latent stands before the image tokens and is cut off by its whole length: every rank keeps all of it.
IMAGE, JOINT = ("ref", "img"), ("txt", "ref", "img")
PE = side(JOINT, dim=2, dims=6)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Define a stream by the first such output, which stays whole."""

    stream: str

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        state.define(self.stream, value.shape[1])
        return value


HUNYUAN_VIDEO = FamilyPlan(
    family="HunyuanVideo",
    model_class="comfy.ldm.hunyuan_video.model.HunyuanVideo",
    modules={
        "img_in": ModulePlan(outputs={0: Counted(stream="img")}),
        "double_blocks.*": ModulePlan(
            inputs={
                "txt": tokens("txt"),
                "img": tokens(IMAGE, replicated=True),
                "pe": PE,
                "modulation_dims_img": TokenRanges(streams=IMAGE),
            },
            attention=JOINT,
        ),
        "single_blocks.*": ModulePlan(inputs={"pe": PE, "modulation_dims": TokenRanges(streams=JOINT)}, attention=JOINT),
        "final_layer": ModulePlan(inputs={"modulation_dims": TokenRanges(streams=("img",))}),
    },
    outputs={"final_layer": gathered("img")},
    control={"input": IMAGE, "output": IMAGE},
)
