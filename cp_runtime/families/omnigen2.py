"""OmniGen2 and Boogu, with reference images."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("txt", "img")


def _rotary(*streams: str) -> ContextParallelInput:
    return ContextParallelInput(split_dim=1, expected_dims=6, streams=streams, side=True)


def _blocks(stream: str) -> ModulePlan:
    hidden = ContextParallelInput(split_dim=1, expected_dims=3, streams=(stream,))
    return ModulePlan(inputs={"hidden_states": hidden, "image_rotary_emb": _rotary(stream)}, attention=(stream,))


# Text and images are refined on their own, then joined.
REFINERS = {"noise_refiner.*": _blocks("noise"), "ref_image_refiner.*": _blocks("references")}
REFINED = {
    "noise_refiner.*": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="noise"),
    "ref_image_refiner.*": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="references"),
}

OMNIGEN2 = FamilyPlan(
    family="OmniGen2",
    model_class="comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    modules={**REFINERS, "layers.*": _blocks("all")},
    outputs={**REFINED, "norm_out": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="all")},
)
BOOGU = FamilyPlan(
    family="Boogu",
    model_class="comfy.ldm.boogu.model.BooguTransformer2DModel",
    modules={
        **REFINERS,
        "double_stream_layers.*": ModulePlan(
            inputs={
                "instruct_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "img_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
                "joint_rotary_emb": _rotary(*JOINT),
                "img_rotary_emb": _rotary("img"),
            },
            attention=JOINT,
        ),
        "double_stream_layers.*.img_self_attn": ModulePlan(attention=("img",)),
        "single_stream_layers.*": ModulePlan(inputs={"image_rotary_emb": _rotary(*JOINT)}, attention=JOINT),
    },
    outputs={**REFINED, "norm_out": ContextParallelOutput(gather_dim=1, expected_dims=3, stream=JOINT)},
)
