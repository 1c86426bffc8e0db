"""CogVideoX 1.0 and 1.5: text to video, image to video, inpainting."""

from typing import Any

import torch

from . import Case, Model, Served, denoise

CLASS = "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel"
COG = dict(
    num_attention_heads=3, attention_head_dim=32, time_embed_dim=64, num_layers=2, in_channels=16, patch_size=2, text_embed_dim=48,
    sample_width=20, sample_height=16, sample_frames=17, max_text_seq_length=8, use_rotary_positional_embeddings=True,
    use_learned_positional_embeddings=False,
)  # fmt: skip
COG_1_5 = dict(COG, in_channels=32, patch_size_t=2, ofs_embed_dim=64)
UNET = {"image_model": "cogvideox"}
MODELS = {
    "cogvideox": Model(CLASS, COG, "CogVideoX_T2V", UNET),
    "cogvideox 2b": Model(CLASS, dict(COG, use_rotary_positional_embeddings=False), "CogVideoX_T2V", UNET),
    "cogvideox i2v": Model(CLASS, dict(COG, in_channels=32, use_learned_positional_embeddings=True), "CogVideoX_I2V", UNET),
    "cogvideox 1.5 i2v": Model(CLASS, COG_1_5, "CogVideoX_I2V", UNET),
    "cogvideox inpaint": Model(CLASS, dict(COG_1_5, in_channels=48, ofs_embed_dim=None), "CogVideoX_Inpaint", UNET),
}


def cogvideox(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 7, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, most=900.0) | extra


CASES = [
    Case("cogvideox", "cogvideox", cogvideox),
    Case("cogvideox odd size batch 2", "cogvideox", lambda: cogvideox(batch=2, frames=5, height=7, width=9, text=5)),
    Case("cogvideox one frame, one text token", "cogvideox", lambda: cogvideox(frames=1, text=1)),
    Case("cogvideox without rotation", "cogvideox 2b", lambda: cogvideox(height=7)),
    Case("cogvideox learned positions", "cogvideox i2v", lambda: cogvideox(channels=32)),
    Case("cogvideox 1.5 image to video", "cogvideox 1.5 i2v",
        lambda: cogvideox(channels=32, frames=5, width=9, ofs=torch.tensor([2.0])), ("ofs",)),
    Case("cogvideox inpaint batch 2", "cogvideox inpaint", lambda: cogvideox(batch=2, channels=48, frames=5, height=9)),
]  # fmt: skip
SERVED = [
    Served("cogvideox", "cogvideox", (16, 3, 8, 10), 7, 48, cfg=2.0),
    Served("cogvideox-i2v", "cogvideox 1.5 i2v", (16, 4, 8, 10), 7, 48, {"concat_latent_image": (1, 16, 1, 8, 10)}),
    Served("cogvideox-inpaint", "cogvideox inpaint", (16, 4, 8, 10), 7, 48, {"concat_latent_image": (1, 32, 4, 8, 10)}),
]
