"""LTX-Video: text and image to video, keyframes, attenuated guides."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, text_mask

LTXV = dict(
    num_layers=2, attention_head_dim=32, num_attention_heads=4, cross_attention_dim=128, caption_channels=48, in_channels=16,
    positional_embedding_max_pos=[20, 2048, 2048],
)  # fmt: skip
# What came with LTX 2.5: no biases in feed-forwards, and a mark on the tokens of single pictures.
MARKED = dict(ff_bias=False, use_keyframes_abs_pos_embedding=True)
CLS = "comfy.ldm.lightricks.model.LTXVModel"


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """A mark that is seen."""
    return values if name == "keyframes_abs_pos_embedding" else None


MODELS = {
    "ltxv": Model(CLS, dict(LTXV, in_channels=128), "LTXV", {"image_model": "ltxv"}),
    "ltxv 3 heads": Model(CLS, dict(LTXV, num_attention_heads=3, cross_attention_dim=96), "LTXV", {"image_model": "ltxv"}),
    "ltxv split rope": Model(CLS, dict(LTXV, rope_type="split", use_middle_indices_grid=True), "LTXV", {"image_model": "ltxv"}),
    "ltxv prompt": Model(CLS, dict(LTXV, cross_attention_adaln=True), "LTXV", {"image_model": "ltxv"}),
    "ltxv marked": Model(CLS, dict(LTXV, **MARKED), "LTXV", {"image_model": "ltxv"}, init, since="0.33.0"),
}


def ltxv(
    batch: int = 1, frames: int = 3, height: int = 4, width: int = 5, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, attention_mask=None, frame_rate=25) | extra


def per_token(batch: int = 1, tokens: int = 60) -> torch.Tensor:
    return torch.rand(batch, tokens, 1, generator=torch.Generator().manual_seed(5))


def generated(first: int, count: int) -> dict[str, int]:
    """Frames of the latent that stand for single pictures, of 4 x 5 tokens each."""
    return {"tokens_per_frame": 20, "first_latent_frame": first, "num_keyframes": count}


def keyframes(batch: int = 1, dropped: int = 0, entries: tuple[dict[str, Any], ...] = (), **extra: Any) -> dict[str, Any]:
    """Three frames and two of guides behind them; `dropped` guide tokens are taken out."""
    mask = torch.ones(batch, 1, 5, 4, 5)
    mask[:, :, 3:] = 0.0
    mask.view(batch, -1)[:, 100 - dropped :] = -1.0
    ids = torch.rand(1, 3, 40, 2, generator=torch.Generator().manual_seed(6)).expand(batch, -1, -1, -1) * 64
    if entries:
        extra["guide_attention_entries"] = [dict(entry, pre_filter_count=20) for entry in entries]
    return ltxv(
        batch=batch, frames=5, timestep=per_token(batch, 100), denoise_mask=mask, keyframe_idxs=ids.contiguous(), **extra
    )  # fmt: skip


WEAK = dict(strength=0.3)
MASKED = dict(
    strength=0.8, pixel_mask=torch.rand(1, 1, 1, 16, 20, generator=torch.Generator().manual_seed(7)), latent_shape=[1, 4, 5]
)
SMALL = dict(MASKED, latent_shape=[1, 3, 4])
NONE = dict(strength=0.0)
GUIDES, GENERATED = ("guide_attention_entries",), ("generated_keyframes",)
CASES = [
    Case("ltxv", "ltxv 3 heads", ltxv),
    Case("ltxv batch 2 odd", "ltxv 3 heads", lambda: ltxv(batch=2, frames=2, height=5, width=5, text=5)),
    Case("ltxv one frame", "ltxv 3 heads", lambda: ltxv(frames=1)),
    Case("ltxv two tokens", "ltxv 3 heads", lambda: ltxv(frames=1, height=1, width=2)),
    Case("ltxv text mask", "ltxv 3 heads", lambda: ltxv(attention_mask=text_mask(1, 6))),
    Case("ltxv text mask batch 2", "ltxv 3 heads", lambda: ltxv(batch=2, attention_mask=text_mask(2, 6))),
    Case("ltxv timestep per token", "ltxv 3 heads", lambda: ltxv(timestep=per_token())),
    Case("ltxv timestep per token batch 2", "ltxv 3 heads", lambda: ltxv(batch=2, timestep=per_token(2))),
    Case("ltxv frame rate", "ltxv 3 heads", lambda: ltxv(frame_rate=10), ("frame_rate",)),
    Case("ltxv split rope", "ltxv split rope", ltxv),
    Case("ltxv prompt timestep", "ltxv prompt", lambda: ltxv(timestep=per_token())),
    Case("ltxv keyframes", "ltxv 3 heads", keyframes, ("keyframe_idxs",)),
    Case("ltxv keyframes dropped", "ltxv 3 heads", lambda: keyframes(batch=2, dropped=13), ("keyframe_idxs",)),
    Case("ltxv guides", "ltxv 3 heads", lambda: keyframes(entries=(WEAK, MASKED)), GUIDES),
    Case("ltxv guides batch 2", "ltxv 3 heads", lambda: keyframes(batch=2, entries=(WEAK, MASKED)), GUIDES),
    Case("ltxv guides dropped", "ltxv 3 heads", lambda: keyframes(dropped=13, entries=(NONE, MASKED)), GUIDES),
    # The mask speaks of fewer tokens than there are: the last ones have none.
    Case("ltxv guides untracked", "ltxv 3 heads", lambda: keyframes(entries=(WEAK, SMALL)), GUIDES),
    Case("ltxv one guide token", "ltxv 3 heads", lambda: keyframes(dropped=39, entries=(WEAK, WEAK)), GUIDES),
    Case("ltxv marked", "ltxv marked", ltxv),
    Case("ltxv marked, generated", "ltxv marked", lambda: ltxv(batch=2, generated_keyframes=generated(1, 2)), GENERATED),
    Case("ltxv marked, generated and guides", "ltxv marked",
        lambda: keyframes(dropped=20, entries=(WEAK, MASKED), generated_keyframes=generated(2, 1)),
        (*GUIDES, *GENERATED, "keyframe_idxs")),
]  # fmt: skip


TEXT = {"frame_rate": 25, "attention_mask": torch.ones(1, 12, dtype=torch.long)}
GUIDED = {key: value for key, value in keyframes(entries=(WEAK, NONE)).items() if key in ("keyframe_idxs", *GUIDES)}
SERVED = [
    Served("ltxv", "ltxv", (128, 3, 4, 4), 12, 48, TEXT),
    Served("ltxv guides", "ltxv", (128, 5, 4, 5), 12, 48, {**TEXT, **GUIDED, "concat_mask": keyframes()["denoise_mask"]}),
]
