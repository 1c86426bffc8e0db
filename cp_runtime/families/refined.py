"""Models that refine parts of their tokens separately before they join them.

Lumina 2, NewBie, Z-Image with omni references, and the pixel-space Z-Image; OmniGen2 and Boogu, with reference images; TripoSplat.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens


def is_patched(state: CallState) -> bool:
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
        # The refiner's output is appended to the text, and to the tokens for patches.
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
JOINT = ("txt", "img")


def _refined(stream: str) -> ModulePlan:
    return ModulePlan(
        inputs={"hidden_states": tokens(stream), "image_rotary_emb": side(stream, dim=1, dims=6)}, attention=(stream,)
    )


# Text and images are refined separately, then joined.
REFINERS = {"noise_refiner.*": _refined("noise"), "ref_image_refiner.*": _refined("references")}
REFINED = {"noise_refiner.*": gathered("noise"), "ref_image_refiner.*": gathered("references")}

OMNIGEN2 = FamilyPlan(
    family="OmniGen2",
    model_class="comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    modules={**REFINERS, "layers.*": _refined("all")},
    outputs={**REFINED, "norm_out": gathered("all")},
)
BOOGU = FamilyPlan(
    family="Boogu",
    model_class="comfy.ldm.boogu.model.BooguTransformer2DModel",
    modules={
        **REFINERS,
        "double_stream_layers.*": ModulePlan(
            inputs={
                "instruct_hidden_states": tokens("txt"),
                "img_hidden_states": tokens("img"),
                "joint_rotary_emb": side(JOINT, dim=1, dims=6),
                "img_rotary_emb": side("img", dim=1, dims=6),
            },
            attention=JOINT,
        ),
        "double_stream_layers.*.img_self_attn": ModulePlan(attention=("img",)),
        "single_stream_layers.*": ModulePlan(inputs={"image_rotary_emb": side(JOINT, dim=1, dims=6)}, attention=JOINT),
    },
    outputs={**REFINED, "norm_out": gathered(JOINT)},
)


def _layers(blocks: str, positions: str, stream: str) -> Mapping[str, ModulePlan]:
    """Plan blocks, and the layers that make their rotary positions from the hidden states."""
    return {
        positions: ModulePlan(inputs={"hidden_states": tokens(stream)}),
        blocks: ModulePlan(inputs={"x": tokens(stream)}, attention=(stream,)),
    }


TRIPOSPLAT = FamilyPlan(
    family="TripoSplat",
    model_class="comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
    modules={
        **_layers("noise_refiner.*", "noise_repo_layers.*", "latent"),
        **_layers("context_refiner.*", "context_repo_layers.*", "image"),
        **_layers("blocks.*", "repo_layers.*", "joint"),
    },
    outputs={
        "noise_refiner.-1": gathered("latent"),
        "context_refiner.-1": gathered("image"),
        "blocks.-1": gathered("joint"),
    },
)
