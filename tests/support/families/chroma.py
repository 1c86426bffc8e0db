"""Chroma and Chroma Radiance."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, joint_mask, residuals

CHROMA = dict(
    in_channels=64, out_channels=64, context_in_dim=48, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=2, depth_single_blocks=2,
    axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=128, hidden_dim=64, n_layers=2,
    txt_ids_dims=[], vec_in_dim=None,
)  # fmt: skip
RADIANCE = dict(
    CHROMA, in_channels=3, out_channels=3, patch_size=4, nerf_hidden_size=16, nerf_mlp_ratio=2, nerf_depth=2, nerf_max_freqs=4,
    nerf_tile_size=8, nerf_final_head_type="conv", nerf_embedder_dtype=None, use_x0=False, use_sequential_txt_ids=False,
)  # fmt: skip
RADIANCE_X0 = dict(RADIANCE, hidden_size=192, num_heads=3, out_dim=192, nerf_tile_size=0, nerf_final_head_type="linear")


def radiance(arguments: dict[str, Any]) -> Model:
    return Model("comfy.ldm.chroma_radiance.model.ChromaRadiance", arguments, "ChromaRadiance", {"image_model": "chroma_radiance"})


MODELS = {
    "chroma": Model("comfy.ldm.chroma.model.Chroma", CHROMA, "Chroma", {"image_model": "chroma"}),
    "radiance": radiance(RADIANCE),
    "radiance x0": radiance(dict(RADIANCE_X0, use_x0=True, use_sequential_txt_ids=True)),
}


def chroma(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, channels: int = 16, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (channels, height, width), text, guidance=torch.zeros(batch)) | extra


def pixels(batch: int = 1, height: int = 24, width: int = 20, **extra: Any) -> dict[str, Any]:
    return chroma(batch, height, width, channels=3, **extra)


# Every weight of the last layers is a function of a token: six factors multiply, and each has the rounding of a whole transformer.
HEAD = 2e-5

CASES = [
    Case("chroma", "chroma", chroma),
    Case("chroma batch 2 odd size", "chroma", lambda: chroma(batch=2, height=13, width=9, text=5)),
    Case("chroma one text token", "chroma", lambda: chroma(text=1)),
    Case("chroma mask", "chroma", lambda: chroma(attention_mask=joint_mask(1, 7, 36)), ("attention_mask",)),
    Case("chroma control", "chroma", lambda: chroma(control=residuals(1, 36)), ("control",)),
    Case("chroma control batch 2", "chroma", lambda: chroma(2, 13, 9, control=residuals(2, 35)), ("control",)),
    Case("radiance", "radiance", pixels, tolerance=HEAD),
    Case("radiance batch 2 odd size", "radiance", lambda: pixels(batch=2, height=17, width=19, text=5), tolerance=HEAD),
    Case("radiance x0", "radiance x0", lambda: pixels(text=8), tolerance=HEAD),
    Case("radiance x0 batch 2", "radiance x0", lambda: pixels(batch=2), tolerance=HEAD),
    Case("radiance mask", "radiance", lambda: pixels(attention_mask=joint_mask(1, 7, 30)), ("attention_mask",), tolerance=HEAD),
    Case("radiance control", "radiance", lambda: pixels(control=residuals(1, 30)), ("control",), tolerance=HEAD),
    Case("radiance options", "radiance", pixels, options={"chroma_radiance_options": {"nerf_tile_size": 0}}, tolerance=HEAD),
]
SERVED = [
    Served("chroma", "chroma", (16, 12, 10), 7, 48, {"guidance": 0.0}),
    Served("chroma_radiance", "radiance", (3, 24, 20), 7, 48, {"guidance": 0.0}),
]
