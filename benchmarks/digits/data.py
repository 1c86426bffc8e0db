"""Handwritten digits: scikit-learn's 1,797 (BSD licence), 8 × 8 pixels. The model and its reader share none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import page

OF_MODEL = 1200
"""Images that the model is trained on. The reader has the other 597."""


def all_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 8, 8] with values from 0 to 1, and their digits [1797], shuffled."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(loaded.images, dtype=torch.float32)[order] / 16, torch.tensor(loaded.target)[order].long()


def of_model() -> tuple[Tensor, Tensor]:
    """What the model is trained on."""
    images, labels = all_digits()
    return images[:OF_MODEL], labels[:OF_MODEL]


def of_reader() -> tuple[Tensor, Tensor]:
    """What the reader is made of."""
    images, labels = all_digits()
    return images[OF_MODEL:], labels[OF_MODEL:]


def image_tokens(latent: Tensor) -> Tensor:
    """Latents [N, 16, height, width] as Flux' image tokens, [N, height / 2, width / 2, 64]."""
    return latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3)


def tokens() -> Tensor:
    """The model's images as image tokens, [1200, 4, 4, 64], values from -1 to 1."""
    pixels = page.enlarge(of_model()[0])[:, None] * 2 - 1
    return image_tokens(functional.pixel_unshuffle(pixels, page.SQUARE))
