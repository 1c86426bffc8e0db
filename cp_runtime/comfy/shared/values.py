"""A model by value: the facts about it besides its network, and the places of its weights in mapped memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...pool.blocks import SharedBlock
from ...pool.messages import Region
from .weights import is_dynamic


class Place(NamedTuple):
    """A tensor in a block of memory.

    Args:
        block: number of the block.
        offset: in bytes.
        device: type of the device that it was on in ComfyUI's process: "cpu", or another one, for which the rank has its own.
    """

    block: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    @property
    def start(self) -> tuple[int, int]:
        return self.block, self.offset

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return extent(self.shape, self.stride) * dtype.itemsize


class Value(NamedTuple):
    """A model by value.

    Args:
        key: names this state of this model.
        data: of `shared.objects.write`: the network, the class of its patcher, `Facts`.
        places: of its tensors.
        blocks: memory in which these are.
        names, classes: see `shared.objects.Written`.
    """

    key: str
    data: bytes
    places: tuple[Place, ...]
    blocks: tuple[SharedBlock, ...]
    names: frozenset[str]
    classes: frozenset[type]

    @property
    def regions(self) -> list[Region]:
        """The memory of its tensors, each once."""
        found: dict[tuple[int, int], int] = {}
        for place in self.places:
            found[place.start] = max(found.get(place.start, 0), place.nbytes)
        return [(block, offset, nbytes) for (block, offset), nbytes in found.items() if nbytes]


class Facts(NamedTuple):
    """What ComfyUI's `BaseModel` knows of its network. A VAE is its own network.

    Args:
        is_vae: there is no `BaseModel`.
        dtype: of the weights.
        cast_dtype: in which it computes, where that is another one.
        fast: its layers multiply in fp8 where the device can.
        dynamic: DynamicVRAM has loaded it. Ranks do without, but give the weights its dtypes.
    """

    is_vae: bool
    dtype: torch.dtype | None
    cast_dtype: torch.dtype | None
    fast: bool
    dynamic: bool

    @classmethod
    def of(cls, model: Any) -> Facts:
        """Return those of a `BaseModel` or a VAE."""
        from comfy.cli_args import PerformanceFeature, args

        if not hasattr(model, "diffusion_model"):
            return cls(True, None, None, False, False)
        fast = model.model_config.optimizations.get("fp8", False) or PerformanceFeature.Fp8MatrixMultiplication in args.fast
        return cls(False, model.get_dtype(), model.manual_cast_dtype, bool(fast), is_dynamic(model))


class Model(nn.Module):
    """Stands for a `BaseModel` on a rank.

    Args:
        network: its transformer.
        facts: of it.
    """

    def __init__(self, network: nn.Module, facts: Facts) -> None:
        super().__init__()
        self.diffusion_model, self.facts = network, facts
        self.manual_cast_dtype = facts.cast_dtype

    def get_dtype(self) -> torch.dtype | None:
        return self.facts.dtype

    def get_dtype_inference(self) -> torch.dtype | None:
        return self.facts.cast_dtype or self.facts.dtype


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many numbers lie between the first and the last one of a tensor, these included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def packed(data: bytes, places: Sequence[Place]) -> bytes:
    """Return a value as bytes, for `rank.objects.read_model`."""
    return json.dumps(places).encode() + b"\n" + data
