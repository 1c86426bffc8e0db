"""OmniGen2 and Boogu, with reference images."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("txt", "img")


def _blocks(stream: str) -> ModulePlan:
    return ModulePlan(
        inputs={"hidden_states": tokens(stream), "image_rotary_emb": side(stream, dim=1, dims=6)}, attention=(stream,)
    )


# Text and images are refined on their own, then joined.
REFINERS = {"noise_refiner.*": _blocks("noise"), "ref_image_refiner.*": _blocks("references")}
REFINED = {"noise_refiner.*": gathered("noise"), "ref_image_refiner.*": gathered("references")}

OMNIGEN2 = FamilyPlan(
    family="OmniGen2",
    model_class="comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    modules={**REFINERS, "layers.*": _blocks("all")},
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
