"""Krea 2."""

from typing import Any

from torch import Tensor

from . import Case, Model, Served, denoise, normal

KREA = dict(
    features=96, channels=16, patch=2, layers=2, heads=3, kvheads=1, multiplier=1, txtlayers=2, txtdim=32, txtheads=2, txtkvheads=2
)


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Weights of norms are stored as what is added to 1."""
    return 0.1 * values if name.endswith(".scale") else None


MODELS = {"krea2": Model("comfy.ldm.krea2.model.SingleStreamDiT", KREA, "Krea2", {"image_model": "krea2"}, init)}


def krea2(batch: int = 1, height: int = 12, width: int = 10, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (16, 1, height, width), text, 64, time="timesteps") | extra


def references(batch: int = 1) -> list[Tensor]:
    return [normal(batch, 16, 1, 8, 6, seed=5), normal(batch, 16, 5, 7, seed=6)]


CASES = [
    Case("krea2", "krea2", krea2),
    Case("krea2 odd size batch 2", "krea2", lambda: krea2(batch=2, height=11, width=9, text=5)),
    Case("krea2 image without frames", "krea2", lambda: krea2(x=normal(1, 16, 12, 10))),
    Case("krea2 one text token", "krea2", lambda: krea2(text=1)),
    Case("krea2 references", "krea2", lambda: krea2(ref_latents=references(), ref_latents_method="index"), ("ref_latents",)),
    Case("krea2 timestep zero batch 2", "krea2",
        lambda: krea2(batch=2, ref_latents=references(2), ref_latents_method="index_timestep_zero"), ("ref_latents",)),
]  # fmt: skip
SERVED = [
    Served("krea2", "krea2", (16, 1, 12, 10), 7, 64, cfg=2.0),
    Served("krea2-edit", "krea2", (16, 1, 12, 10), 7, 64,
        {"reference_latents": [(1, 16, 1, 8, 6)], "reference_latents_method": "index_timestep_zero"}),
]  # fmt: skip
