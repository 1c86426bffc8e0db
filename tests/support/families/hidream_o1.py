"""HiDream-O1."""

from typing import Any

import torch

from . import Case, Model, Served, normal

TEXT = dict(
    hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=32,
    rope_dims=[6, 5, 5],
)  # fmt: skip
VISION = dict(hidden_size=48, num_heads=3, intermediate_size=64, depth=1, num_position_embeddings=64)
O1 = dict(text_config_overrides=TEXT, vision_config_overrides=VISION)
MODELS = {"hidream o1": Model("comfy.ldm.hidream_o1.model.HiDreamO1Transformer", O1, "HiDreamO1", {"image_model": "hidream_o1"})}
IDS = [151644, 872, 198, *range(300, 306), 151645, 198, 151673]  # a chat, and the token that carries the timestep


def o1(
    batch: int = 1, height: int = 96, width: int = 128, refs: tuple[tuple[int, int], ...] = (), ids: list[int] = IDS, **extra: Any
) -> dict[str, Any]:
    """What ComfyUI makes of a prompt: references come as tokens of a vision model in the text, and as patches behind the image."""
    seen = [151652, *[151655] * sum(h * w // 4 for h, w in refs), 151653] if refs else []
    ids = [*ids[:3], *seen, *ids[3:]]
    patches, behind = height * width // 32**2, sum(h * w for h, w in refs)
    tokens = len(ids) + patches + behind
    positions = torch.randint(0, 40, (1, 3, tokens), generator=torch.Generator().manual_seed(1))
    call = dict(
        x=normal(batch, 3, height, width),
        timesteps=torch.linspace(300.0, 900.0, batch),
        input_ids=torch.tensor([ids]).expand(batch, -1).clone(),
        position_ids=positions.expand(batch, -1, -1).clone(),
        vinput_mask=(torch.arange(tokens) >= len(ids)).expand(batch, -1).clone(),
        ar_len=len(ids) - 1,
    )
    if refs:
        call |= dict(
            ref_pixel_values=normal(1, behind, 3 * 2 * 16 * 16).expand(batch, -1, -1).clone(),
            ref_image_grid_thw=torch.tensor([[[1, h, w] for h, w in refs]]).expand(batch, -1, -1).clone(),
            ref_patches=normal(batch, behind, 3 * 32 * 32),
        )
    return {**call, **extra}


# Anything there keeps the model from keeping keys and values.
NOTHING_KEPT = {"patches_replace": {"dit": {"other": None}}}
REFS = ((2, 4), (4, 2))
CASES = [
    Case("o1 kept keys", "hidream o1", o1),
    Case("o1 nothing kept", "hidream o1", o1, options=NOTHING_KEPT),
    Case("o1 batch 2", "hidream o1", lambda: o1(batch=2, height=64, width=160)),
    Case("o1 batch 2 nothing kept", "hidream o1", lambda: o1(batch=2, height=64, width=160), options=NOTHING_KEPT),
    Case("o1 nothing causal", "hidream o1", lambda: o1(height=32, width=64, ids=IDS[-1:])),
    # A reference image is known by its identity, so that every call finds nothing kept and keeps what it has.
    Case("o1 references", "hidream o1", lambda: o1(refs=REFS), ("ref_pixel_values",)),
    Case("o1 references batch 2", "hidream o1", lambda: o1(batch=2, refs=REFS), ("ref_pixel_values",)),
    Case("o1 no mask", "hidream o1", lambda: o1(vinput_mask=None)),
]
SERVED = [
    Served("hidream o1", "hidream o1", (3, 64, 64), 4, 96, {"text_input_ids": torch.tensor([IDS])}),
    Served("hidream o1 references", "hidream o1", (3, 64, 64), 4, 96,
        {"text_input_ids": torch.tensor([IDS]), "reference_latents": [(1, 64, 64, 3)]}),
]  # fmt: skip
