"""TripoSplat: a latent of fixed length and a camera."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, normal

CLASS = "comfy.ldm.triposplat.model.LatentSeqMMFlowModel"
TRIPOSPLAT = dict(
    q_token_length=29, in_channels=16, out_channels=16, model_channels=128, cond_channels=48, cond2_channels=12, num_blocks=2,
    num_refiner_blocks=2, num_head_channels=32, mlp_ratio=2,
)  # fmt: skip


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Norms of queries and keys are matrices."""
    return 1.5 + 0.1 * values if name.endswith("gamma") else None


def model(**arguments: Any) -> Model:
    return Model(CLASS, {**TRIPOSPLAT, **arguments}, "TripoSplat", {"image_model": "triposplat"}, init)


MODELS = {
    "triposplat": model(),
    "triposplat 3 heads": model(model_channels=96, share_mod=False, qk_rms_norm=False, q_token_length=12),
}


def triposplat(batch: int = 1, latent: int = 29, image: int = 13, **extra: Any) -> dict[str, Any]:
    return dict(
        x=[normal(batch, latent, 16), normal(batch, 1, 5)], t=torch.linspace(0.3, 0.9, batch), context=normal(batch, image, 48),
        ref_latents=[normal(batch, 12, 3, 4)],
    ) | extra  # fmt: skip


# Norms of queries and keys make sharp scores, which amplify rounding: 1.06e-5 with the narrowest vectors.
SHARP = 2e-5

CASES = [
    Case("triposplat", "triposplat", triposplat, ("ref_latents",), tolerance=SHARP),
    Case("triposplat batch 2", "triposplat", lambda: triposplat(2, image=14), ("ref_latents",), tolerance=SHARP),
    Case("triposplat without reference", "triposplat", lambda: triposplat(ref_latents=None), tolerance=SHARP),
    Case("triposplat 3 heads", "triposplat 3 heads", lambda: triposplat(latent=12)),
    Case("triposplat 3 heads batch 2", "triposplat 3 heads", lambda: triposplat(2, latent=12)),
]
SERVED = [Served("triposplat", "triposplat", [(29, 16), (1, 5)], 13, 48, {"reference_latents": [(1, 12, 3, 4)]})]
