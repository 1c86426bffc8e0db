"""Latents of two computations of the same thing, and of two things."""

from torch import Tensor

TOLERANCE = 2e-4
"""Of several steps on a server: docs/numerics.md."""


def distance(out: Tensor, expected: Tensor) -> float:
    """The largest difference, in standard deviations of what is expected, which must be those of a picture."""
    assert out.shape == expected.shape
    assert expected.std() > 1e-2
    return float((out - expected).abs().max() / expected.std())


def assert_close(out: Tensor, expected: Tensor, bound: float = TOLERANCE) -> None:
    """Check that a latent is another one up to rounding."""
    off = distance(out, expected)
    assert off <= bound, f"off by {off:.1e} of the standard deviation, {bound:.1e} allowed"


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are of different pictures."""
    return one.shape != other.shape or bool((one - other).abs().max() > 1e-2 * one.std())
