"""ACE-Step 1."""

from typing import Any

import torch

from ..sizes import LYRIC_ENCODER
from . import Case, Model, Served, fan_in, normal

CLASS = "comfy.ldm.ace.model.ACEStepTransformer2DModel"
ACE = dict(
    num_layers=2, attention_head_dim=16, num_attention_heads=3, mlp_ratio=2.5, max_position=512, speaker_embedding_dim=512,
    text_embedding_dim=48, ssl_encoder_depths=[], ssl_names=[], ssl_latent_dims=[], lyric_encoder_vocab_size=40,
    lyric_hidden_size=64,
)  # fmt: skip
# Width, inner width and layers of the encoder of lyrics.
MODELS = {"ace": Model(CLASS, ACE, "ACEStep", {"audio_model": "ace"}, fan_in, sizes=LYRIC_ENCODER)}


def ace(batch: int = 1, length: int = 24, text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        x=normal(batch, 8, 16, length), timestep=torch.linspace(100.0, 900.0, batch), context=normal(batch, text, 48),
        speaker_embeds=normal(batch, 512), lyric_token_idx=torch.arange(batch * 9).view(batch, 9) % 40, lyrics_strength=0.9,
    ) | extra  # fmt: skip


CASES = [
    Case("ace", "ace", ace, ("lyrics_strength",)),
    Case("ace batch 2 odd length", "ace", lambda: ace(2, 29, 5)),
    Case("ace two tokens", "ace", lambda: ace(length=2)),
]
LYRICS = {"conditioning_lyrics": torch.arange(9).view(1, 9)}
SERVED = [Served("ace_step", "ace", (8, 16, 29), 7, 48, {**LYRICS, "lyrics_strength": 0.9})]
