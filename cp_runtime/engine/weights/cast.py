"""Weights whose pages in a file have another dtype than they appear to have.

A loader that converts a file's weights copies them in every process. These are converted on use instead: on the target device of a
copy, one at a time, with the same rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...compat import arguments_of, as_parameter, no_torch_function, parameter_slots, tensor_without_storage
from ...nested import map_tensors, tensors

aten = torch.ops.aten


class CastWeight(Tensor):
    """A weight of one dtype whose numbers are stored in another one.

    Reads give numbers of its own dtype. A view of it, or a write to it, converts the numbers in this process's memory for good:
    `settled`.
    """

    _held: list[Tensor]  # the storage, shared by every tensor detached from this one
    __torch_function__ = no_torch_function

    def __new__(cls, held: list[Tensor], dtype: torch.dtype) -> CastWeight:
        (numbers,) = held
        made: CastWeight = tensor_without_storage(cls, numbers.shape, numbers.stride(), dtype, numbers.device)
        made._held = held
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CastWeight(shape={list(self.shape)}, dtype={self.dtype}, held={self._held[0].dtype})"

    @property
    def held(self) -> Tensor:
        """The stored numbers."""
        return self._held[0]

    def plain(self, device: torch.device | None = None) -> Tensor:
        """Return a plain tensor of its dtype, on `device` or its current one. A copy, unless it is settled."""
        return self.held.to(device or self.device).to(self.dtype)

    def settled(self) -> Tensor:
        """Convert the weight in this process's memory, once and for all, and return it."""
        if self.held.dtype != self.dtype:
            with torch.inference_mode(False), torch.no_grad():  # usable in every mode, whichever the caller is in
                self._held[0] = self.plain()
        return self.held

    def data_ptr(self) -> int:
        return self.settled().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.settled().untyped_storage()

    def numpy(self, **kwargs: Any) -> Any:
        return self.settled().numpy(**kwargs)

    def tolist(self) -> Any:
        return self.settled().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settled().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return as_parameter(CastWeight([self.held if self.held.dtype != self.dtype else self.held.clone()], self.dtype), False)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if function is aten.detach.default:
            return CastWeight(args[0]._held, args[0].dtype)
        if function is aten._has_compatible_shallow_copy_type.default:
            return False  # `module.to` then makes another parameter
        if function is aten.empty_like.default:
            return function(args[0].held, **{**kwargs, "dtype": kwargs.get("dtype") or args[0].dtype})
        made = function.decompose(*args, **kwargs)  # `to` may be a copy or a no-op
        if made is not NotImplemented:
            return made
        device = kwargs.get("device")
        if function is aten._to_copy.default and args[0].held.dtype != args[0].dtype:
            return args[0].plain(device).to(kwargs.get("dtype") or args[0].dtype)
        if function is aten.copy_.default:
            device = args[0].device
        names = [argument.name for argument in arguments_of(function)]
        given = dict(zip(names, args)) | kwargs  # noqa: B905  (defaults follow)
        aliased = {argument.name for argument in arguments_of(function) if argument.alias_info is not None}
        shared = {id(tensor) for name in aliased for tensor in tensors(given.get(name))}

        def operand(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, CastWeight):
                return tensor
            return tensor.settled() if id(tensor) in shared else tensor.plain(device)

        return function(*map_tensors(args, operand), **map_tensors(kwargs, operand))


def counting_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this dtype on the same memory, if both dtypes are floating-point; else the tensor itself."""
    if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
        return tensor
    return CastWeight([tensor], dtype)


def memory_of(weight: Tensor) -> Tensor:
    """Return the plain tensor that stores a weight's numbers."""
    return weight.held if isinstance(weight, CastWeight) else weight


def plain(weight: Tensor) -> Tensor:
    """Return the same numbers as a tensor that any operator accepts."""
    return weight.plain() if isinstance(weight, CastWeight) else weight


def settle(model: nn.Module) -> None:
    """Convert all such weights of a model, as its loader would have done."""
    for module in model.modules():
        for name, weight in parameter_slots(module).items():
            if isinstance(weight, CastWeight):
                parameter_slots(module)[name] = as_parameter(weight.settled(), weight.requires_grad)
