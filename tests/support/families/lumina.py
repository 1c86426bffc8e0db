"""Lumina 2, NewBie, Z-Image with omni references, and the pixel-space Z-Image."""

from typing import Any

from torch import Tensor

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.lumina.model.NextDiT"
LUMINA = dict(
    patch_size=2, in_channels=16, dim=96, cap_feat_dim=48, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=1, multiple_of=64,
    ffn_dim_multiplier=1.0, qk_norm=True, axes_dims=[8, 12, 12], axes_lens=[300, 512, 512], rope_theta=10000.0,
)  # fmt: skip
Z_IMAGE = dict(
    LUMINA, dim=256, n_heads=4, n_kv_heads=4, axes_dims=[16, 24, 24], axes_lens=[1536, 512, 512], rope_theta=256.0,
    z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
)  # fmt: skip
PIXEL = dict(
    Z_IMAGE, patch_size=4, in_channels=3, decoder_hidden_size=64, decoder_num_res_blocks=1, decoder_max_freqs=4,
    decoder_in_channels=48,
)  # fmt: skip
UNET = {"image_model": "lumina2"}


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Scores and conditions of a usual size: sharp attention and a steep decoder make noise of rounding."""
    if name == "dec_net.cond_embed.weight":
        return 0.2 * values / parameter.shape[1] ** 0.5
    return 0.8 + 0.1 * values if name.endswith((".q_norm.weight", ".k_norm.weight")) else None


MODELS = {
    "lumina2": Model(CLASS, LUMINA, "Lumina2", UNET, init),
    "newbie": Model(CLASS, dict(LUMINA, clip_text_dim=40), "Lumina2", UNET, init),
    "z-image": Model(CLASS, Z_IMAGE, "ZImage", UNET, init),
    "z-image omni": Model(CLASS, dict(Z_IMAGE, siglip_feat_dim=24), "ZImage", UNET, init),
    "z-image pixel": Model(CLASS + "PixelSpace", PIXEL, "ZImagePixelSpace", {"image_model": "zimage_pixel"}, init),
}


def lumina(batch: int = 1, height: int = 12, width: int = 10, text: int = 7, channels: int = 16, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (channels, height, width), text, time="timesteps", num_tokens=text) | extra


def mirror(arguments: dict[str, Any]) -> dict[str, Any]:
    """A patch that needs all tokens in their order."""
    return {"img": arguments["img"] + 0.1 * arguments["img"].flip(1) + 0.1 * arguments["img_input"]}


PATCHES = {"patches": {"noise_refiner": [mirror], "double_block": [mirror]}}
OMNI: dict[str, Any] = dict(ref_latents=[normal(1, 16, 8, 6)], ref_contexts=[normal(1, 5, 48)])
# A text of no reference comes behind the image's own.
OMNI_BEHIND: dict[str, Any] = dict(OMNI, ref_contexts=[normal(1, 5, 48), normal(1, 3, 48, seed=1)])
CASES = [
    Case("lumina2", "lumina2", lumina),
    Case("lumina2 odd size batch 2", "lumina2", lambda: lumina(batch=2, height=11, width=9, text=5)),
    Case("lumina2 one text token", "lumina2", lambda: lumina(text=1)),
    Case("newbie", "newbie", lambda: lumina(batch=2, clip_text_pooled=normal(2, 40)), ("clip_text_pooled",)),
    Case("z-image", "z-image", lumina),
    Case("z-image odd size batch 2", "z-image", lambda: lumina(batch=2, height=11, width=13, text=33)),
    Case("z-image omni", "z-image omni", lambda: lumina(**OMNI), ("ref_latents", "ref_contexts")),
    Case("z-image omni text behind", "z-image omni", lambda: lumina(**OMNI_BEHIND), ("ref_latents", "ref_contexts")),
    Case("z-image omni batch 2", "z-image omni",
        lambda: lumina(batch=2, height=13, ref_latents=[normal(2, 16, 8, 6)], ref_contexts=[normal(2, 5, 48)]), ("ref_latents",)),
    Case("z-image omni features", "z-image omni", lambda: lumina(**OMNI, siglip_feats=[normal(1, 3, 5, 24)]),
        ("ref_latents", "siglip_feats")),
    Case("z-image reference without features", "z-image", lambda: lumina(**OMNI), ("ref_latents",)),
    Case("z-image shifted positions", "z-image", lumina,
        options={"rope_options": {"scale_y": 0.5, "scale_x": 2.0, "shift_y": 3.0, "shift_x": 1.0}}),
    Case("z-image pixel", "z-image pixel", lambda: lumina(channels=3, height=24, width=22)),
    Case("z-image patched", "z-image", lambda: lumina(batch=2, height=11), options=PATCHES),
    Case("z-image omni patched", "z-image omni", lambda: lumina(**OMNI), options=PATCHES),
    Case("z-image pixel patched", "z-image pixel", lambda: lumina(channels=3, height=24, width=22), options=PATCHES),
    Case("z-image pixel batch 2", "z-image pixel", lambda: lumina(batch=2, channels=3, height=29, width=21)),
]  # fmt: skip
SERVED = [
    Served("lumina2", "lumina2", (16, 12, 10), 7, 48, cfg=2.0),
    Served("newbie", "newbie", (16, 12, 10), 7, 48, {"pooled_output": (1, 40)}),
    Served("z-image", "z-image", (16, 12, 10), 7, 48, batch=2),
    Served("z-image-omni", "z-image omni", (16, 12, 10), 7, 48,
        {"reference_latents": [(1, 16, 8, 6)], "reference_latents_text_embeds": [(1, 5, 48)]}),
    Served("z-image-pixel", "z-image pixel", (3, 24, 20), 7, 48),
]  # fmt: skip
