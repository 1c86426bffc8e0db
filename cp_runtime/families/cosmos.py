"""Cosmos 1 and Predict2, and Anima: text to image, text and image to video."""

import math
from dataclasses import dataclass, replace
from typing import Any

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import GridInput
from .family import FamilyPlan, gathered, side

VIDEO = ("video",)


@dataclass(frozen=True, kw_only=True)
class Frames(GridInput):
    """Split the grid of all tokens. The tokens of one frame are a stream too, split as inside each frame."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        state.define("frame", math.prod(value.shape[self.dim + 1 : self.dim + 3]))
        return super().__call__(state, value, where)


def whole_grid(state: CallState, value: Any, where: str) -> Any:
    """Return a tensor in the shape of the whole grid, for modules that derive positions from a shape."""
    return value[:, :1, :1, :1].expand(-1, *state.grids["video"], -1)


# Between blocks the model itself adds positions to its tokens: both are split from the beginning.
COSMOS = FamilyPlan(
    family="Cosmos 1",
    model_class="comfy.ldm.cosmos.model.GeneralDIT",
    modules={
        "x_embedder": ModulePlan(outputs={0: Frames(stream="video")}),
        "pos_embedder": ModulePlan(inputs={"x_B_T_H_W_C": whole_grid}, outputs={0: side(VIDEO, dim=0, dims=4)}),
        "extra_pos_embedder": ModulePlan(inputs={"x_B_T_H_W_C": whole_grid}, outputs={0: GridInput(stream="video", side=True)}),
        "blocks.*.blocks.0": ModulePlan(attention=VIDEO),  # FA-CA-MLP: the second one attends to text
    },
    outputs={"final_layer": gathered("frame")},
)
COSMOS_PREDICT2 = FamilyPlan(
    family="Cosmos Predict2",
    model_class="comfy.ldm.cosmos.predict2.MiniTrainDIT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x_B_T_H_W_D": GridInput(stream="video"),
                "rope_emb_L_1_1_D": side(VIDEO, dim=1, dims=6),
                "extra_per_block_pos_emb": GridInput(stream="video", side=True),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
    },
    outputs={"final_layer": gathered("video", dims=5)},
)
# Its text encoder runs before the sharded forward.
ANIMA = replace(COSMOS_PREDICT2, family="Anima", model_class="comfy.ldm.anima.model.Anima")
