"""Latents of two computations of the same thing, and of two things."""

from torch import Tensor


def assert_close(out: Tensor, expected: Tensor, bound: float = 2e-4) -> None:
    """Check that a latent is another one up to rounding: within `bound` of its standard deviation, which must be one of a picture.

    Args:
        bound: docs/numerics.md; the default is that of several steps on a server.
    """
    assert out.shape == expected.shape
    assert expected.std() > 1e-2
    off = ((out - expected).abs().max() / expected.std()).item()
    assert off <= bound, f"off by {off:.1e} of the standard deviation, {bound:.1e} allowed"


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are of different pictures."""
    return one.shape != other.shape or bool((one - other).abs().max() > 1e-2 * one.std())
