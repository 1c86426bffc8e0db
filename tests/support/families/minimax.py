"""MiniMax H3: video with sound."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, normal

MINIMAX = dict(
    hidden_size=96, num_layers=2, token_refiner_num_layers=1, num_attention_heads=3, attention_head_dim=32, ffn_hidden_size=128,
    latents_dim=24, audio_latents_dim=32, text_dim=48, timestep_input_dim=64, time_embed_hidden_size=64, time_embed_dim=48,
    rope_inv_freq_len=4,
)  # fmt: skip
CLS = "comfy.ldm.minimax.model.MiniMaxH3Model"


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Buffers that the constructor leaves to the checkpoint."""
    return {"rope.inv_freq": 0.5 ** torch.arange(4), "adaln_t_table": values}.get(name)


MODELS = {
    "minimax": Model(CLS, MINIMAX, "MiniMaxH3", {"image_model": "minimax_h3"}, init),
    "minimax curve": Model(CLS, dict(MINIMAX, adaln_curve_grid=9), "MiniMaxH3", {"image_model": "minimax_h3"}, init),
}


def minimax(frames: int = 3, height: int = 8, width: int = 10, sound: int = 7, text: int = 9, **payload: Any) -> dict[str, Any]:
    return dict(
        x=[normal(1, 24, frames, height, width), normal(1, 32, 2, sound)],
        timestep=torch.tensor([600.0]),
        context=normal(1, text, 48),
        minimax_payload={"seed": 3, **payload},
    )


def anchored() -> dict[str, Any]:
    latent = [normal(1, 24, 1, 8, 10, seed=i) for i in (4, 5)]
    frames = [{"latent": z, "resolved_frame_index": i} for z, i in zip(latent, (0, 8), strict=True)]
    return minimax(keyframes=frames, frame_count=9, cond_video_latents=latent)


def guided() -> dict[str, Any]:
    """Clips with sound at some frames, in front of an image with a voice."""
    clip, voice, image = normal(1, 24, 2, 8, 10, seed=4), [normal(1, 32, 2, 2), normal(1, 32, 2, 3)], normal(1, 24, 1, 4, 6)
    frames = [
        {"latent": clip, "audio_latent": voice[0], "resolved_frame_index": 4},
        {"audio_latent": voice[1], "resolved_frame_index": 0},
    ]
    refs = [{"kind": "image", "latent_h": 4, "latent_w": 6}]
    return minimax(keyframes=frames, refs=refs, cond_video_latents=[clip, image], cond_audio_latents=voice)


def masked(frames: int = 3, height: int = 8, width: int = 10, sound: int = 7) -> dict[str, Any]:
    """What is kept, a little and as it is: a strength per 2 x 2 patch, and per frame of sound."""
    video = torch.linspace(0, 1, frames * height * width).reshape(1, 1, frames, height, width)
    heard = torch.linspace(0, 1, sound).expand(1, 1, 2, sound)
    return {**minimax(frames, height, width, sound), "denoise_mask": video, "audio_denoise_mask": heard}


def referenced(**extra: Any) -> dict[str, Any]:
    """An image, a voice, and a video with sound."""
    video, sound = [normal(1, 24, 1, 4, 6), normal(1, 24, 2, 6, 4)], [normal(1, 32, 2, 3), normal(1, 32, 2, 4)]
    refs = [
        {"kind": "image", "latent_h": 4, "latent_w": 6},
        {"kind": "audio", "ref_audio_t": 3},
        {"kind": "video_audio", "ref_audio_t": 4, "latent_t": 2, "latent_h": 6, "latent_w": 4},
    ]
    return minimax(refs=refs, cond_video_latents=video, cond_audio_latents=sound, **extra)


TAGS = torch.tensor([[1, 1, 0, 0, 1, 2, 2, 1, 1]])
PAYLOAD = ("minimax_payload",)
CASES = [
    Case("minimax", "minimax", minimax),
    Case("minimax odd", "minimax", lambda: minimax(frames=2, height=7, width=9, sound=3, text=5)),
    Case("minimax one token each", "minimax", lambda: minimax(frames=1, height=2, width=2, sound=1, text=1)),
    Case("minimax text tags", "minimax", lambda: minimax(text_token_tags=TAGS), PAYLOAD),
    Case("minimax key frames", "minimax", anchored, PAYLOAD),
    Case("minimax references", "minimax", referenced, PAYLOAD),
    Case("minimax references noise", "minimax",
        lambda: referenced(visual_cond_noise_aug=0.7, audio_cond_noise_aug=0.6, text_token_tags=TAGS), PAYLOAD),
    Case("minimax curve", "minimax curve", minimax),
    Case("minimax guides", "minimax", guided, PAYLOAD, since="0.33.0"),
    Case("minimax masks", "minimax", masked, ("denoise_mask", "audio_denoise_mask"), since="0.33.0"),
    Case("minimax masks odd", "minimax", lambda: masked(2, 7, 9, 3), ("denoise_mask",), since="0.33.0"),
]  # fmt: skip
SERVED = [Served("minimax", "minimax", [(24, 3, 8, 8), (32, 2, 10)], 12, 48, single=True)]
