"""Tensors inside nested lists, tuples and dicts, and inside of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def leaves(value: Any) -> Iterator[Any]:
    """Yield all leaves of nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples and dicts."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return rebuild(value, [map_tensors(item, function) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def difference(value: Any, expected: Any) -> float:
    """Return the root-mean-square difference, in standard deviations of the expected result; the largest of several tensors."""
    # On the host: some GPUs have no float64.
    pairs = [(a.cpu().double(), b.cpu().double()) for a, b in zip(tensors(value), tensors(expected), strict=True)]
    return max(((a - b).square().mean().sqrt() / b.std()).item() for a, b in pairs)


def form_of(value: Any) -> object:
    """Return a key of the inputs that decide a forward's path: shapes, dtypes and which values there are, but not their numbers."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(form_of, value))
    if isinstance(value, dict):
        return tuple((key, form_of(item)) for key, item in value.items())
    return value if isinstance(value, (bool, int, str)) else type(value)


def rebuild(value: Any, items: list[Any]) -> Any:
    """Make a tuple, named tuple or list of the same type with other items."""
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def has_elements(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers in memory, one by one."""
    return not (tensor.is_meta or tensor.is_quantized) and tensor.layout is torch.strided


def elements(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as they are, complex ones as pairs. torch may have left a sign or a conjugation for later."""
    plain = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def stored(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that make up a tensor: itself, or a quantised weight's data and scales."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's protocol for tensors that wrap others
    if flatten is None:
        return [(tensor.as_subclass(Tensor) if is_plain_storage_subclass(tensor) else tensor).detach()]
    return [part for name in flatten()[0] for part in stored(getattr(tensor, name))]


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of torch's own class, and no parameter."""
    return type(value) in (Tensor,) and not isinstance(value, Parameter)


def is_plain_storage_subclass(tensor: Tensor) -> bool:
    """Return whether a tensor is plain memory under a class that adds attributes and no operators, as GGUF loaders have one."""
    cls = type(tensor)
    return (
        cls not in (Tensor, Parameter)
        and cls.__torch_dispatch__ is Tensor.__torch_dispatch__
        and not hasattr(cls, "__tensor_flatten__")
    )


def dressed_as(tensor: Tensor, model: Tensor) -> Tensor:
    """Return plain memory under the class of a dressed tensor, with the attributes that the memory lacks."""
    made = tensor.as_subclass(type(model))
    vars(made).update(vars(model) | vars(made))
    return made


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory. Some classes return the tensor itself if they are asked to detach it."""
    return dressed_as(stored(tensor)[0], tensor) if is_plain_storage_subclass(tensor) else tensor.detach()
