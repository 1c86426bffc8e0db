"""Pack weights into one run of bytes, of which every rank keeps a shard, and unpack them.

Bytes rather than numbers, so that every format survives unchanged. A tensor that wraps others, as quantised weights do, names them
by torch's `__tensor_flatten__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat import tensor_without_storage
from ...errors import PlanError
from ...nested import dressed_as, is_plain_storage_subclass, stored, tensors

ALIGNMENT = 256  # bytes; kernels want 16, CPU libraries 64, and CUDA allocates in steps of this

Build = Callable[[Iterator[Tensor]], Tensor]
"""Takes the plain tensors of a weight from the front of an iterator, and rebuilds the weight."""


class Part(NamedTuple):
    """Offset in bytes and layout of a plain tensor in the run."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, run: Tensor) -> Tensor:
        flat = run[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


class Packing:
    """The layout of some weights in a run of `nbytes` bytes. Equal on all ranks, because their weights are."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._parts: list[Part] = []
        self.nbytes = 0
        for part in (part for weight in weights for part in stored(weight)):
            self._parts.append(Part(self.nbytes, part.nbytes, part.shape, _dense_stride(part), part.dtype))
            self.nbytes = round_up(self.nbytes + part.nbytes, ALIGNMENT)
        self._builds = [_build(weight) for weight in weights]

    def views(self, run: Tensor) -> list[Tensor]:
        """View the weights in a run `[bytes]` that holds them."""
        parts = iter([part.view(run) for part in self._parts])
        return [build(parts) for build in self._builds]

    def absent(self, device: torch.device, names: Sequence[str], remedy: str) -> list[Tensor]:
        """Return stand-ins for absent weights: see `AbsentWeight`."""
        parts, weights = iter(self._parts), []
        for name, build in zip(names, self._builds, strict=True):
            weights.append(build(AbsentWeight(part, device, name, remedy) for part in parts))
        return weights

    def copy_range(self, weights: Sequence[Tensor], begin: int, target: Tensor) -> None:
        """Fill `target` `[bytes]` with the run from `begin` on, given the weights. Their other bytes are not read."""
        parts = [part for weight in weights for part in stored(weight)]
        end = begin + target.numel()
        for at, part in zip(self._parts, parts, strict=True):
            low, high = max(begin, at.offset), min(end, at.offset + at.nbytes)
            if low < high:
                target[low - begin : high - begin].copy_(_raw(part)[low - at.offset : high - at.offset])


# Reads or replacements of numbers without an operator that `__torch_dispatch__` sees. A file would hold a weight without numbers.
AROUND_OPERATORS = {
    Tensor.__reduce_ex__,
    Tensor.numpy,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.tolist,
    Tensor.untyped_storage,
}
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class AbsentWeight(Tensor):
    """A weight that is not in this process now. It has shape, dtype and device, but no numbers.

    Operations that need its numbers, or would give it some, raise PlanError. Others, as `to` its own device, pass.
    """

    _message: str

    def __new__(cls, part: Part, device: torch.device, name: str, remedy: str) -> AbsentWeight:
        made: AbsentWeight = tensor_without_storage(cls, part.shape, part.stride, part.dtype, device)
        made._message = f"{name} was read while it is not on this rank: every rank keeps a part of its bytes. {remedy}"
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AbsentWeight(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = function == SET_DATA and args[0] is not args[1]  # `module.to` sets unchanged weights, too
        if changes or function in AROUND_OPERATORS:
            raise PlanError(next(value for value in tensors(args) if isinstance(value, AbsentWeight))._message)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        absent = next(value for value in tensors((args, kwargs or {})) if isinstance(value, AbsentWeight))
        if function is torch.ops.aten.detach.default:  # for the names in a state dict
            return absent
        raise PlanError(absent._message)


def round_up(number: int, step: int) -> int:
    """Return the least multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def _build(weight: Tensor) -> Build:
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        return partial(_dress, weight) if is_plain_storage_subclass(weight) else next
    names, context = flatten()
    inner, cls, size, stride = [_build(getattr(weight, name)) for name in names], type(weight), weight.size(), weight.stride()

    def build(parts: Iterator[Tensor]) -> Tensor:
        made: Tensor = cls.__tensor_unflatten__(  # type: ignore[attr-defined]
            {name: build(parts) for name, build in zip(names, inner, strict=True)}, context, size, stride
        )
        return made

    return build


def _dress(weight: Tensor, parts: Iterator[Tensor]) -> Tensor:
    part = next(parts)
    return part if isinstance(part, AbsentWeight) else dressed_as(part, weight)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the stride with which the tensor's numbers fill a piece of memory: its own if they do."""
    return torch.empty_like(tensor, device="meta").stride()


def _raw(tensor: Tensor) -> Tensor:
    """View the bytes of a tensor in memory order; of a copy where it is not dense."""
    tensor = tensor.detach()
    dense = tensor if tensor.stride() == _dense_stride(tensor) else tensor.clone()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
