"""TRELLIS 2 and Pixal3D: the dense grid of the structure, then voxels for the shape and its texture."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, normal

CLS = "comfy.ldm.trellis2.model.Trellis2"
TRELLIS = dict(resolution=8, model_channels=96, cond_channels=48, num_blocks=2, num_heads=3, mlp_ratio=2, init_txt_model=True)
PROJECTED = dict(
    image_attn_mode_structure="proj", proj_in_channels_structure=10, image_attn_mode_shape="proj", proj_in_channels_shape=12,
    image_attn_mode_texture="proj", proj_in_channels_texture=14,
)  # fmt: skip
CHANNELS = {"shape_generation_512": 12, "shape_generation": 12, "texture_generation": 14}


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Norms of queries and keys are matrices; modulation is added to what the timestep gives."""
    if name.endswith("gamma"):
        return 1.5 + 0.1 * values
    return 0.3 * values if name.endswith("modulation") else None


def model(**arguments: Any) -> Model:
    return Model(CLS, {**TRELLIS, **arguments}, "Trellis2", {"image_model": "trellis2"}, init, since="0.33.0")


MODELS = {
    "trellis": model(),
    "trellis modulated blocks": model(num_heads=4, share_mod=False, qk_rms_norm=False, init_txt_model=False),
    "trellis texture": model(txt_only=True),
    "pixal": model(**PROJECTED),
}


def structure(batch: int = 1, **extra: Any) -> dict[str, Any]:
    call = dict(x=normal(batch, 32, 16, 16, 16), timestep=torch.linspace(0.3, 0.9, batch), context=normal(batch, 5, 48))
    return {**call, "embeds": normal(batch, 6, 48), **extra}


def coords(*counts: int) -> Tensor:
    """Item and place of every voxel: distinct ones, in the order in which a grid is read."""
    generator = torch.Generator().manual_seed(sum(counts))
    places = [torch.randperm(512, generator=generator)[:count].sort().values for count in counts]
    items = [torch.stack([torch.full_like(p, i), p // 64, p // 8 % 8, p % 8], 1) for i, p in enumerate(places)]
    return torch.cat(items).int()


def voxels(mode: str, *counts: int, batch: int = 0, projected: bool = False, **extra: Any) -> dict[str, Any]:
    """Objects of so many voxels, each `batch // objects` times."""
    batch, total = batch or len(counts), sum(counts)
    call = dict(
        x=normal(batch, 32, max(counts), 1), timestep=torch.linspace(0.3, 0.9, batch), context=normal(batch, 5, 48),
        embeds=normal(batch, 6, 48), trellis2_coords=coords(*counts), trellis2_coord_counts=torch.tensor(counts),
        trellis2_generation_mode=mode,
    )  # fmt: skip
    if mode == "texture_generation":
        call |= {"trellis2_shape_slat": normal(total, 32, seed=1), "trellis2_model_frame": "z_up"}
    if projected:
        call["trellis2_proj_feats"] = normal(total, CHANNELS[mode], seed=2)
    return {**call, **extra}


SMALL, SHAPE, TEXTURE = CHANNELS
CFG, SWAPPED, UNCOND = ({"cond_or_uncond": kinds} for kinds in ([0, 1], [1, 0], [1]))
CASES = [
    Case("trellis structure", "trellis", structure),
    Case("trellis structure cfg", "trellis modulated blocks", lambda: structure(2), options=CFG),
    Case("trellis 512", "trellis", lambda: voxels(SMALL, 37)),
    Case("trellis 512 cfg", "trellis", lambda: voxels(SMALL, 37, batch=2), options=CFG),
    Case("trellis 512 two objects cfg", "trellis", lambda: voxels(SMALL, 23, 23, batch=4), options=CFG),
    Case("trellis shape", "trellis modulated blocks", lambda: voxels(SHAPE, 41, batch=2), options=CFG),
    Case("trellis shape uneven", "trellis", lambda: voxels(SHAPE, 40, 17)),
    Case("trellis shape uneven cfg", "trellis modulated blocks", lambda: voxels(SHAPE, 19, 41, batch=4), options=CFG),
    Case("trellis shape nearly even", "trellis", lambda: voxels(SHAPE, 40, 41, 40)),
    Case("trellis shape nearly even cfg", "trellis", lambda: voxels(SHAPE, 41, 40, batch=4), options=CFG),
    Case("trellis shape one voxel and many", "trellis", lambda: voxels(SHAPE, 41, 1)),
    Case("trellis shape of two voxels", "trellis", lambda: voxels(SHAPE, 2, 1, batch=4), options=CFG),
    Case("trellis shape of one voxel", "trellis", lambda: voxels(SHAPE, 1)),
    Case("trellis shape same voxels", "trellis", lambda: voxels(SHAPE, 33, batch=2, trellis2_coord_counts=None)),
    Case("trellis shape same voxels batch 3", "trellis", lambda: voxels(SHAPE, 34, batch=3, trellis2_coord_counts=None)),
    Case("trellis texture", "trellis", lambda: voxels(TEXTURE, 38, batch=2)),
    Case("trellis texture uneven", "trellis", lambda: voxels(TEXTURE, 12, 29, 30)),
    Case("trellis texture alone", "trellis texture", lambda: voxels(TEXTURE, 31)),
    Case("trellis texture alone uneven cfg", "trellis texture", lambda: voxels(TEXTURE, 30, 11, batch=4), options=CFG),
    Case("pixal structure", "pixal", lambda: structure(trellis2_proj_feats=normal(1, 4096, 10))),
    Case("pixal structure cfg", "pixal", lambda: structure(2, trellis2_proj_feats=normal(1, 4096, 10)), options=CFG),
    Case("pixal 512", "pixal", lambda: voxels(SMALL, 37, projected=True)),
    Case("pixal 512 cfg", "pixal", lambda: voxels(SMALL, 37, batch=2, projected=True), options=CFG),
    Case("pixal shape cfg", "pixal", lambda: voxels(SHAPE, 40, batch=2, projected=True), options=CFG),
    Case("pixal shape uneven cfg", "pixal", lambda: voxels(SHAPE, 40, 27, batch=4, projected=True), options=CFG),
    Case("pixal shape uncond first", "pixal", lambda: voxels(SHAPE, 35, batch=2, projected=True), options=SWAPPED),
    Case("pixal shape uncond alone", "pixal", lambda: voxels(SHAPE, 35, batch=2, projected=True), options=UNCOND),
    Case("pixal texture", "pixal", lambda: voxels(TEXTURE, 28, 29, projected=True)),
    Case("pixal texture cfg", "pixal", lambda: voxels(TEXTURE, 29, batch=2, projected=True), options=CFG),
]


def conditioning(mode: str, count: int, projected: int = 0) -> dict[str, Any]:
    """Entries of a conditioning for one object."""
    found = {"embeds": (1, 6, 48), "trellis2_coords": coords(count), "trellis2_coord_counts": torch.tensor([count])}
    found |= {"trellis2_generation_mode": mode}
    if mode == TEXTURE:
        found |= {"trellis2_shape_slat": (count, 32), "trellis2_model_frame": "z_up"}
    return {**found, "trellis2_proj_feats": (count, projected)} if projected else found


SERVED = [
    Served("trellis2_structure", "trellis", (32, 16, 16, 16), 5, 48, {"embeds": (1, 6, 48)}),
    Served("trellis2_shape_512", "trellis", (32, 37, 1), 5, 48, conditioning(SMALL, 37)),
    Served("trellis2_texture", "trellis texture", (32, 41, 1), 5, 48, conditioning(TEXTURE, 41)),
    Served("pixal3d_shape", "pixal", (32, 40, 1), 5, 48, conditioning(SHAPE, 40, 12)),
]
