"""Reads the digits of a page: kernel ridge regression on images that the model has never seen. It needs no scikit-learn.

python benchmarks/digits/reader.py    # makes reader.safetensors, and says how well it reads real digits
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from digits import page

FILE = HERE / "reader.safetensors"
SHARPNESS, RIDGE = 0.25, 0.1


def kernel(images: Tensor, known: Tensor) -> Tensor:
    """How alike images are, [N, M], values from 0 to 1."""
    return torch.exp(-SHARPNESS * torch.cdist(images, known) ** 2)


@cache
def loaded() -> tuple[Tensor, Tensor]:
    tensors = load_file(FILE)
    return tensors["images"].float() / 16, tensors["weights"]


def read(images: Tensor) -> Tensor:
    """The digits of images […, 64], values from 0 to 1."""
    known, weights = loaded()
    return (kernel(images.flatten(0, -2), known) @ weights).argmax(1).view(images.shape[:-1])


def legible(pictures: Tensor, rows: Tensor) -> Tensor:
    """Which digits of pictures [B, 256, 256] are what the rows [B, 8] were to show: [B, 8, 8]."""
    return read(page.digits(pictures)) == rows[:, :, None]


def main() -> None:
    from digits import data

    images, labels = data.of_reader()
    known = images.flatten(1)
    like = kernel(known, known) + RIDGE * torch.eye(len(known))
    weights = torch.linalg.solve(like, functional.one_hot(labels, 10).float())
    save_file({"images": (known * 16).to(torch.uint8), "weights": weights.contiguous()}, FILE)
    others, truth = data.of_model()
    shown = functional.avg_pool2d(page.enlarge(others)[:, None], page.PIXELS // 8).flatten(1)
    for name, seen in (("as they are", others.flatten(1)), ("as a page shows them", shown)):
        print(f"{FILE.name} reads {100 * (read(seen) == truth).float().mean():.1f} % of {len(truth)} real digits {name}")


if __name__ == "__main__":
    main()
