"""LTX-2: video with sound."""

from typing import Any

import torch

from . import Case, Model, Served, ltxv, normal, text_mask
from .ltxv import GENERATED, GUIDES, MARKED, MASKED, NONE, SMALL, WEAK, generated, init, keyframes

LTX2 = dict(
    num_layers=2, in_channels=16, attention_head_dim=32, num_attention_heads=3, cross_attention_dim=96, audio_attention_head_dim=16,
    audio_num_attention_heads=3, audio_cross_attention_dim=48, caption_channels=48, connector_attention_head_dim=16,
    connector_num_attention_heads=2, connector_num_layers=1, use_middle_indices_grid=True,
)  # fmt: skip
FULL = dict(
    LTX2, cross_attention_adaln=True, apply_gated_attention=True, rope_type="split", frequencies_precision="float64",
    av_ca_timestep_scale_multiplier=1000.0,
)  # fmt: skip
BEFORE = dict(FULL, caption_proj_before_connector=True)
# LTX 2.5, whose text goes through connectors as wide as the streams, either from the text encoder or ready.
LTX25 = dict(
    BEFORE, **MARKED, audio_ff_bias=False, connector_attention_head_dim=32, connector_num_attention_heads=3,
    audio_connector_attention_head_dim=16, audio_connector_num_attention_heads=3,
)  # fmt: skip
PLAIN = dict(LTX25, cross_attention_adaln=False, use_prompt_adaln_single=False)
WIDE = dict(in_channels=128, num_attention_heads=4, cross_attention_dim=128, connector_num_attention_heads=4)
CLS = "comfy.ldm.lightricks.av_model.LTXAVModel"
UNET = {"image_model": "ltxav"}
MODELS = {
    "ltx2": Model(CLS, LTX2, "LTXAV", UNET),
    "ltx2 full": Model(CLS, FULL, "LTXAV", UNET),
    "ltx2 connector": Model(CLS, BEFORE, "LTXAV", UNET),
    "ltx2 served": Model(CLS, dict(LTX2, in_channels=128, num_attention_heads=4, cross_attention_dim=128), "LTXAV", UNET),
    "ltx2.5": Model(CLS, LTX25, "LTXAV", UNET, init, since="0.33.0"),
    "ltx2.5 plain": Model(CLS, PLAIN, "LTXAV", UNET, init, since="0.33.0"),
    "ltx2.5 served": Model(CLS, dict(LTX25, **WIDE), "LTXAV", UNET, init, since="0.33.0"),
}


def ltx2(
    batch: int = 1, frames: int = 3, height: int = 4, width: int = 5, sound: int = 7, text: int = 6, **extra: Any
) -> dict[str, Any]:
    timestep = torch.full((batch,), 0.6)
    return dict(
        x=[normal(batch, 16, frames, height, width), normal(batch, 8, sound, 16)], timestep=timestep, a_timestep=timestep,
        context=normal(batch, text, 96), attention_mask=None, frame_rate=25,
    ) | extra  # fmt: skip


def per_token(batch: int = 1, tokens: int = 60) -> torch.Tensor:
    """Of the same largest value in every item of a batch: gates between video and sound follow the largest of all of them."""
    timesteps = ltxv.per_token(batch, tokens)
    timesteps[:, 0] = 1.0
    return timesteps


def per_frame(batch: int = 1, frames: int = 3, tokens: int = 20) -> torch.Tensor:
    """Timesteps of tokens that are the same within a frame."""
    return per_token(batch, frames).repeat_interleave(tokens, 1)


def image_to_video(batch: int = 1, **extra: Any) -> dict[str, Any]:
    """The first frame is given."""
    mask = torch.ones(batch, 1, 3, 4, 5)
    mask[:, :, 0] = 0.0
    return ltx2(batch=batch, timestep=mask.flatten(1).unsqueeze(-1) * 0.7, denoise_mask=mask, **extra)


def inpaint(**extra: Any) -> dict[str, Any]:
    """A mask that varies inside frames."""
    return ltx2(timestep=per_token(), denoise_mask=per_token().view(1, 1, 3, 4, 5), **extra)


def guided(batch: int = 1, per_frame_timesteps: bool = True, **extra: Any) -> dict[str, Any]:
    call = keyframes(batch=batch, **extra)
    timestep = per_frame(batch, 5) if per_frame_timesteps else per_token(batch, 100)
    return {
        **ltx2(batch=batch),
        **call,
        "context": normal(batch, 6, 96),
        "x": [call["x"], normal(batch, 8, 7, 16)],
        "timestep": timestep,
    }


TEXT25 = {"context": normal(1, 6, 144)}


def ltx25(**extra: Any) -> dict[str, Any]:
    return {**ltx2(**extra), **TEXT25}


def guided25(**extra: Any) -> dict[str, Any]:
    return {**guided(**extra), **TEXT25}


VIDEO_ONLY = normal(1, 16, 3, 4, 5)
APART = {"a2v_cross_attn": False, "v2a_cross_attn": False}
STG, ALL_STG = {"stg_self_attn_blocks": (1,)}, {"stg_self_attn_blocks": (0, 1)}
REFERENCE = {"tokens": normal(1, 5, 128)}
CASES = [
    Case("ltx2", "ltx2", ltx2),
    Case("ltx2 batch 2 odd", "ltx2", lambda: ltx2(batch=2, frames=2, height=5, width=5, sound=10, text=5)),
    Case("ltx2 text mask", "ltx2", lambda: ltx2(attention_mask=text_mask(1, 6))),
    Case("ltx2 2 tokens a frame", "ltx2", lambda: ltx2(height=1, width=2, sound=1, timestep=per_frame(tokens=2))),
    Case("ltx2 one token a frame", "ltx2", lambda: ltx2(height=1, width=1, sound=2, timestep=per_token(tokens=3))),
    Case("ltx2 video only", "ltx2", lambda: ltx2(x=[VIDEO_ONLY])),
    Case("ltx2 audio timesteps", "ltx2", lambda: ltx2(a_timestep=per_token(tokens=7))),
    Case("ltx2 per-frame timesteps", "ltx2", lambda: ltx2(timestep=per_frame())),
    Case("ltx2 per-frame timesteps batch 2", "ltx2 full", lambda: ltx2(batch=2, timestep=per_frame(2), a_timestep=per_token(2, 7))),
    Case("ltx2 image to video", "ltx2 full", image_to_video),
    Case("ltx2 image to video batch 2", "ltx2 full", lambda: image_to_video(batch=2)),
    Case("ltx2 inpaint", "ltx2 full", inpaint, ("denoise_mask",)),
    Case("ltx2 reference audio", "ltx2 full", lambda: ltx2(ref_audio=REFERENCE), ("ref_audio",)),
    Case("ltx2 reference audio timesteps", "ltx2", lambda: ltx2(batch=2, ref_audio=REFERENCE, a_timestep=per_token(2, 7)),
        ("ref_audio",)),
    Case("ltx2 full", "ltx2 full", ltx2),
    Case("ltx2 connector", "ltx2 connector", lambda: ltx2(context=normal(1, 6, 144))),
    Case("ltx2 no cross attention", "ltx2", ltx2, options=APART),
    Case("ltx2 video alone", "ltx2", ltx2, options={"run_ax": False}),
    Case("ltx2 keyframes", "ltx2 full", guided, ("keyframe_idxs",)),
    Case("ltx2 keyframes frame dropped", "ltx2 full", lambda: guided(dropped=20), ("keyframe_idxs",)),
    Case("ltx2 keyframes dropped", "ltx2", lambda: guided(batch=2, dropped=13, per_frame_timesteps=False), ("keyframe_idxs",)),
    Case("ltx2 guides", "ltx2 full", lambda: guided(entries=(WEAK, MASKED)), GUIDES),
    Case("ltx2 guides batch 2", "ltx2", lambda: guided(batch=2, entries=(WEAK, MASKED)), GUIDES),
    Case("ltx2 guides dropped", "ltx2", lambda: guided(dropped=13, entries=(NONE, MASKED)), GUIDES),
    Case("ltx2 guides untracked", "ltx2", lambda: guided(entries=(WEAK, SMALL)), GUIDES),
    Case("ltx2.5", "ltx2.5", ltx25),
    Case("ltx2.5 plain batch 2", "ltx2.5 plain", lambda: ltx2(batch=2, context=normal(2, 6, 144))),
    Case("ltx2.5 generated", "ltx2.5", lambda: ltx25(generated_keyframes=generated(1, 2)), GENERATED),
    Case("ltx2.5 generated and guides", "ltx2.5",
        lambda: guided25(dropped=20, entries=(WEAK, MASKED), generated_keyframes=generated(2, 1)),
        (*GUIDES, *GENERATED, "keyframe_idxs")),
    # Self-attention that returns its values, in one block and in all of them: nothing is shared there.
    Case("ltx2.5 a block without self-attention", "ltx2.5", ltx25, options=STG),
    Case("ltx2.5 no self-attention, guides", "ltx2.5 plain", lambda: guided25(entries=(WEAK, MASKED)), options=ALL_STG),
    Case("ltx2.5 a block without self-attention, alone", "ltx2.5 plain", ltx25, options={**STG, **APART}),
]  # fmt: skip
TEXT = {"frame_rate": 25, "unprocessed_ltxav_embeds": True}
SERVED = [
    Served("ltx2", "ltx2 served", [(128, 3, 4, 4), (8, 10, 16)], 12, 96, {"frame_rate": 25}),
    Served("ltx2.5", "ltx2.5 served", [(128, 3, 4, 4), (8, 10, 16)], 12, 48, TEXT),
    Served("ltx2.5 keyframes", "ltx2.5 served", [(128, 3, 4, 5), (8, 10, 16)], 12, 48,
        {**TEXT, "generated_keyframes": generated(1, 2)}),
]  # fmt: skip
