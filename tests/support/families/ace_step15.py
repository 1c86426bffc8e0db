"""ACE-Step 1.5: text to music, covers, null embeddings. More tokens than the window of every other layer reaches."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel"
ACE = dict(
    hidden_size=64, text_hidden_dim=48, num_dit_layers=3, num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1,
    num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, fsq_dim=64, encoder_hidden_size=64,
    encoder_intermediate_size=96, encoder_num_heads=4,
)  # fmt: skip


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Convolutions have kernels, which the default scale forgets."""
    return values / parameter[0].numel() ** 0.5 if parameter.ndim == 3 and name.endswith("1.weight") else None


UNET = {"audio_model": "ace1.5"}
MODELS = {
    "ace 1.5": Model(CLASS, ACE, "ACEStep15", UNET, init),
    "ace 1.5 3 heads": Model(CLASS, dict(ACE, num_heads=3, num_kv_heads=3, encoder_num_heads=3, hidden_size=48, sliding_window=5),
        "ACEStep15", UNET, init),
}  # fmt: skip


def ace(batch: int = 1, length: int = 64, text: int = 7, lyrics: int = 9, **extra: Any) -> dict[str, Any]:
    return denoise(
        batch, (64, length), text, lyric_embed=normal(batch, lyrics, 48), refer_audio=normal(batch, 64, length), is_covers=False,
    ) | extra  # fmt: skip


CODES = torch.tensor([[5, 63999, 1234, 20000]])
CASES = [
    Case("ace 1.5 within the window", "ace 1.5", ace),
    Case("ace 1.5 beyond the window", "ace 1.5", lambda: ace(length=1201)),
    Case("ace 1.5 beyond the window batch 2", "ace 1.5", lambda: ace(2, 802)),
    Case("ace 1.5 batch 2 odd length", "ace 1.5", lambda: ace(2, 59, 5, 8)),
    Case("ace 1.5 one token", "ace 1.5", lambda: ace(length=2)),
    Case("ace 1.5 cover", "ace 1.5", lambda: ace(is_covers=True)),
    Case("ace 1.5 codes", "ace 1.5", lambda: ace(is_covers=None, audio_codes=CODES), ("audio_codes",)),
    Case("ace 1.5 null embeddings", "ace 1.5", lambda: ace(replace_with_null_embeds=True), ("replace_with_null_embeds",)),
    Case("ace 1.5 3 heads, short window", "ace 1.5 3 heads", lambda: ace(length=71)),
]
SERVED = [
    Served("ace_step_15", "ace 1.5", (64, 600), 7, 48, {"conditioning_lyrics": (1, 9, 48)}),
    Served("ace_step_15_cover", "ace 1.5", (64, 63), 7, 48,
        {"conditioning_lyrics": (1, 9, 48), "reference_audio_timbre_latents": [(1, 64, 63)]}),
]  # fmt: skip
