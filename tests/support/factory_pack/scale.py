"""What the loaders do to a weight."""

from torch import Tensor

FACTOR = 0.5


def scaled(weight: Tensor) -> Tensor:
    return (weight.float() * FACTOR).to(weight.dtype)
