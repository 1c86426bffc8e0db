"""Text and picture in one attention, as two streams."""

from typing import Any

from ..engine.plan import ModulePlan
from ..engine.ranks.sharding import Split
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

IMAGE, TEXT_FIRST, IMAGE_FIRST = ("img",), ("txt", "img"), ("img", "txt")

AURA_FLOW = FamilyPlan(
    family="AuraFlow",
    model_class="comfy.ldm.aura.mmdit.MMDiT",
    modules={
        "double_layers.*": ModulePlan(inputs={"c": tokens("txt"), "x": tokens("img")}, attention=TEXT_FIRST),
        "single_layers.*": ModulePlan(attention=TEXT_FIRST),
    },
    outputs={"final_linear": gathered("img")},
)
COGVIDEOX = FamilyPlan(  # 1.0 and 1.5: text to video, image to video, inpainting
    family="CogVideoX",
    model_class="comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "encoder_hidden_states": tokens("txt"),
                "hidden_states": tokens("video"),
                "image_rotary_emb": side("video", dim=0, dims=2),
            },
            attention=("txt", "video"),
        ),
    },
    outputs={"proj_out": gathered("video")},
)
ROPE = side(IMAGE_FIRST, dim=1, dims=6)
HIDREAM = FamilyPlan(
    family="HiDream-I1",
    model_class="comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
    modules={
        "double_stream_blocks.*": ModulePlan(
            # Every block appends its text to the tokens, and cuts it off again by its length: it stays whole.
            inputs={"image_tokens": tokens("img"), "text_tokens": tokens("txt", replicated=True), "rope": ROPE},
            attention=IMAGE_FIRST,
        ),
        "single_stream_blocks.*": ModulePlan(inputs={"rope": ROPE}, attention=IMAGE_FIRST),
    },
    outputs={"final_layer": gathered("img")},
)
HIDDEN_STATES = {"hidden_states": tokens("img"), "encoder_hidden_states": tokens("txt")}
JOYIMAGE = FamilyPlan(
    family="JoyImage",
    model_class="comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
    modules={
        "double_blocks.*": ModulePlan(
            inputs={**HIDDEN_STATES, "image_rotary_emb": side("img", dim=1, dims=6)}, attention=IMAGE_FIRST
        ),
    },
    # The image tokens before the references are taken by their absolute position.
    outputs={"double_blocks.-1": gathered("img")},
)
LENS = FamilyPlan(
    family="Lens",
    model_class="comfy.ldm.lens.model.LensTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={
                **HIDDEN_STATES,
                "freqs_cis": side(IMAGE_FIRST, dim=2, dims=6),
                # The block requires one column per local token.
                "attention_mask": side(IMAGE_FIRST, dim=3, dims=4),
            },
            attention=IMAGE_FIRST,
        ),
    },
    outputs={"proj_out": gathered("img")},
    control={"input": "img"},
)
BLOCK_INPUTS = {
    "encoder_hidden_states": tokens("txt"),
    "hidden_states": tokens("img"),
    "image_rotary_emb": side(TEXT_FIRST, dim=2, dims=6),
    "encoder_hidden_states_mask": side("txt", dim=1, dims=2),
}
QWEN_IMAGE = FamilyPlan(
    family="Qwen-Image",
    model_class="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={**BLOCK_INPUTS, "timestep_zero_index": TokenRanges(streams=("img",))}, attention=TEXT_FIRST
        ),
    },
    outputs={"proj_out": gathered("img")},
    control={"input": "img"},
)
MAGE_FLOW = FamilyPlan(
    family="Mage-Flow",
    model_class="comfy.ldm.mage_flow.model.MageFlowTransformer2DModel",
    modules={"transformer_blocks.*": ModulePlan(inputs=BLOCK_INPUTS, attention=TEXT_FIRST)},
    outputs={"proj_out": gathered("img")},
    control={"input": "img"},
)
SD3 = FamilyPlan(
    family="SD3",
    model_class="comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    modules={"joint_blocks.*": ModulePlan(inputs={"args[0]": tokens("txt"), "args[1]": tokens("img")})},
    outputs={"final_layer": gathered("img")},
    # SD3.5 medium attends twice in a block: over both streams, and over the image alone. Every rank has a text token, so the
    # number of queries tells which.
    attention=((TEXT_FIRST, TEXT_FIRST), (IMAGE, IMAGE)),
    control={"output": "img"},
)
PIXELDIT = FamilyPlan(  # in pixels
    family="PixelDiT",
    model_class="comfy.ldm.pixeldit.model.PixDiT_T2I",
    modules={
        "patch_blocks.*": ModulePlan(
            inputs={
                "x": tokens("img"),
                "y": tokens("txt"),
                "pos_img": side("img", dim=0, dims=4),
                "pos_txt": side("txt", dim=0, dims=4),
            },
            attention=TEXT_FIRST,
        ),
        # These blocks make positions from the size of the image, so they keep all pixels, and share their attention.
        "pixel_blocks.*.attn": ModulePlan(inputs={"x": tokens("patches", replicated=True)}, attention=("patches",)),
    },
    outputs={"patch_blocks.-1": [gathered("img"), None]},
)
PID = FamilyPlan(  # decodes a latent with it
    family="PiD",
    model_class="comfy.ldm.pixeldit.pid.PidNet",
    modules={
        "lq_proj.gate_modules.*": ModulePlan(inputs={"x": tokens("img"), "lq": side("img", dim=1, dims=3)}),
        **PIXELDIT.modules,
    },
    outputs=PIXELDIT.outputs,
)


def text_crop(state: CallState, value: Any, where: str) -> Any:
    """Define the text tokens that take part in attention: the first ones of a block's text."""
    state.define("txt", min(int(value), state.lengths["all txt"]), Split(replicated=True))
    return value


MOCHI_ROPE = side("img", dim=0, dims=3)

MOCHI = FamilyPlan(
    family="Mochi",
    model_class="comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    modules={
        "blocks.*": ModulePlan(inputs={"x": tokens("img"), "y": tokens("all txt", replicated=True)}),
        "blocks.*.attn": ModulePlan(
            inputs={"crop_y": text_crop, "rope_rotation.rope_cos": MOCHI_ROPE, "rope_rotation.rope_sin": MOCHI_ROPE},
            attention=IMAGE_FIRST,
        ),
    },
    outputs={"final_layer": gathered("img")},
)

# A reference latent comes before the image tokens and is cut off by its whole length: every rank keeps all of it.
WITH_REFERENCE, JOINT = ("ref", "img"), ("txt", "ref", "img")
PE = side(JOINT, dim=2, dims=6)


def counted(state: CallState, value: Any, where: str) -> Any:
    """Define the image by the first such output, which stays whole."""
    state.define("img", value.shape[1])
    return value


HUNYUAN_VIDEO = FamilyPlan(
    family="HunyuanVideo",
    model_class="comfy.ldm.hunyuan_video.model.HunyuanVideo",
    modules={
        "img_in": ModulePlan(outputs={0: counted}),
        "double_blocks.*": ModulePlan(
            inputs={
                "txt": tokens("txt"),
                "img": tokens(WITH_REFERENCE, replicated=True),
                "pe": PE,
                "modulation_dims_img": TokenRanges(streams=WITH_REFERENCE),
            },
            attention=JOINT,
        ),
        "single_blocks.*": ModulePlan(inputs={"pe": PE, "modulation_dims": TokenRanges(streams=JOINT)}, attention=JOINT),
        "final_layer": ModulePlan(inputs={"modulation_dims": TokenRanges(streams=("img",))}),
    },
    outputs={"final_layer": gathered("img")},
    control={"input": WITH_REFERENCE, "output": WITH_REFERENCE},
)
