"""Lumina 2, NewBie, Z-Image with omni references, and the pixel-space Z-Image."""

from dataclasses import replace

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens


def is_patched(state: CallState) -> bool:
    """Return whether patches of other nodes run between the layers."""
    options = state.arguments.get("transformer_options") or {}
    return bool(options.get("patches", {}).get("double_block"))


def _blocks(stream: str) -> ModulePlan:
    return ModulePlan(
        inputs={
            "x": tokens(stream),
            "freqs_cis": side(stream, dim=1, dims=6),
            "timestep_zero_index": TokenRanges(streams=(stream,)),
        },
        attention=(stream,),
    )


LUMINA = FamilyPlan(
    family="Lumina 2",
    model_class="comfy.ldm.lumina.model.NextDiT",
    modules={
        "noise_refiner.*": _blocks("img"),
        "layers.*": _blocks("all"),
        "final_layer": ModulePlan(inputs={"x": tokens("all"), "timestep_zero_index": TokenRanges(streams=("all",))}),
    },
    outputs={
        # What a refiner returns is appended to the text, and to what patches see.
        "noise_refiner.*": gathered("img"),
        # Between the layers patches of other nodes cut the image tokens off by their absolute position.
        "layers.*": gathered("all", when=is_patched),
        "final_layer": gathered("all"),
    },
)
PIXEL = replace(
    LUMINA,
    family="Z-Image pixel space",
    model_class="comfy.ldm.lumina.model.NextDiTPixelSpace",
    modules={path: plan for path, plan in LUMINA.modules.items() if path != "final_layer"},
    # The decoder takes the image tokens by their absolute position.
    outputs={
        "noise_refiner.*": LUMINA.outputs["noise_refiner.*"],
        "layers.*": LUMINA.outputs["layers.*"],
        "layers.-1": gathered("all", when=lambda state: not is_patched(state)),
    },
)
