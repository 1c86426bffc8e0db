"""Stable Audio Open 1.0, Open Small (with statistics over tokens) and 3."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, fan_in, normal

CLASS = "comfy.ldm.audio.dit.AudioDiffusionTransformer"
OPEN = dict(
    io_channels=8, embed_dim=128, depth=2, num_heads=4, cond_token_dim=768, global_cond_dim=1536, project_cond_tokens=True,
)  # fmt: skip
# Fewer heads of keys than of queries in cross-attention, as published.
CONCAT = dict(OPEN, project_cond_tokens=False, cond_token_dim=64, input_concat_dim=2, prepend_cond_dim=32, patch_size=2)
STABLE_AUDIO_3 = dict(
    OPEN, num_heads=3, embed_dim=96, global_cond_dim=768, num_memory_tokens=3, norm_type="rms_norm",
    attn_kwargs={"qk_norm": "rms", "differential": True}, timestep_features_type="expo", local_add_cond_dim=9,
    global_cond_shared_embed=True, global_cond_type="adaLN",
)  # fmt: skip


def init(name: str, tensor: Tensor, values: Tensor) -> Tensor | None:
    """Rotary frequencies are part of a checkpoint."""
    if name.endswith("inv_freq"):
        return 10000.0 ** -(torch.arange(len(tensor)) / len(tensor))
    return fan_in(name, tensor, values)


def embedder(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Of a number of seconds; features are learned where the width is odd."""
    path = f"conditioners.{name}.embedder.embedding."
    return {path + "1.weight": (768, width), path + "1.bias": (768,), **({path + "0.weights": (width // 2,)} if width % 2 else {})}


LEARNED = {**embedder("seconds_start", 257), **embedder("seconds_total", 257)}
UNET = {"audio_model": "dit1.0"}
MODELS = {
    "open": Model(CLASS, OPEN, "StableAudio", UNET, init, LEARNED),
    "small": Model(CLASS, dict(OPEN, attn_kwargs={"qk_norm": "ln", "feat_scale": True}), "StableAudio", UNET, init, LEARNED),
    "concat": Model(CLASS, CONCAT, "StableAudio", UNET, init),
    "stable audio 3": Model(CLASS, STABLE_AUDIO_3, "StableAudio3", UNET, init, embedder("seconds_total", 256)),
}


def open_1(batch: int = 1, length: int = 24, text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        x=normal(batch, 8, length), t=torch.linspace(0.3, 0.9, batch), cross_attn_cond=normal(batch, text, 768),
        global_embed=normal(batch, 1536),
    ) | extra  # fmt: skip


def version_3(batch: int = 1, length: int = 24, text: int = 7, known: int | None = None, **extra: Any) -> dict[str, Any]:
    local = normal(batch, 9, length if known is None else known, seed=4)
    return {**open_1(batch, length, text), "global_embed": normal(batch, 768), "local_add_cond": local, **extra}


PREPENDED: dict[str, Any] = {"prepend_cond": normal(1, 3, 32), "prepend_cond_mask": torch.ones(1, 3, dtype=torch.bool)}
CASES = [
    Case("stable audio open", "open", open_1),
    Case("stable audio open batch 2 odd length", "open", lambda: open_1(2, 29, 5)),
    Case("stable audio open one frame", "open", lambda: open_1(length=1)),
    Case("stable audio open without text", "open", lambda: open_1(cross_attn_cond=None, global_embed=None)),
    Case("stable audio small", "small", open_1),
    Case("stable audio small batch 2 odd length", "small", lambda: open_1(2, 29, 5)),
    Case("stable audio concat, prepended, patches of 2", "concat",
        lambda: open_1(length=26, cross_attn_cond=normal(1, 7, 64), input_concat_cond=normal(1, 2, 13), **PREPENDED),
        ("prepend_cond",)),
    Case("stable audio 3", "stable audio 3", version_3, ("local_add_cond",)),
    Case("stable audio 3 batch 2 odd length", "stable audio 3", lambda: version_3(2, 29, 5), ("local_add_cond",)),
    Case("stable audio 3 known end", "stable audio 3", lambda: version_3(known=5), ("local_add_cond",)),
    Case("stable audio 3 known longer", "stable audio 3", lambda: version_3(known=40), ("local_add_cond",)),
    Case("stable audio 3 one frame", "stable audio 3", lambda: version_3(length=1)),
]  # fmt: skip
SERVED = [
    Served("stable_audio_open", "open", (8, 24), 7, 768),
    Served("stable_audio_small", "small", (8, 29), 7, 768, {"seconds_start": 0, "seconds_total": 11}),
    Served("stable_audio_3", "stable audio 3", (8, 29), 7, 768, {"concat_latent_image": (1, 8, 29), "concat_mask": (1, 1, 29)}),
]
