"""What calls of VAEs and upscale models have in common in the UI process and on the ranks."""

from torch import Tensor

UPSCALE = "upscale"
METHODS = ("decode", "encode", UPSCALE)
EXACT, TILES = "exact", "tiles"
INPUT = "pictures"
"""Argument that ranks leave in the memory of the message: each copies only its part. `exact`: a tensor; `tiles`: a list."""
CALLED = "called"
"""Argument with what is called in place of a method of the network: `shared.objects.Written.leaves`."""


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the outermost in memory to the innermost. A dimension of one fits anywhere: behind the
    others of its stride, it gets the same stride in a contiguous copy."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))
