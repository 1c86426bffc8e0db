"""Functions by which ranks rebuild the values that ComfyUI's process sends: it names these, and no others of this package."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import as_parameter
from ...system.native import set_closure
from .fingerprint import bare, bodies_in
from .modules import find, take_module

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def make_class(factory: str, arguments: dict[str, Any], path: str) -> Any:
    made = find(factory)(**arguments)
    for part in path.split(".")[1:]:
        made = getattr(made, part)
    return made


def build_class(outer: str, inner: str, bases: tuple[type, ...]) -> Any:
    """Make the class that a function makes, from its body there, which uses no variables of the function."""
    (body,), namespace = bodies_in(outer, inner)
    return builtins.__build_class__(bare(body, namespace), inner, *bases)


def make_function(outer: str, inner: str, number: int) -> FunctionType:
    bodies, namespace = bodies_in(outer, inner)
    return bare(bodies[number], namespace)


def fill_function(function: FunctionType, state: tuple[Any, Any, tuple[Any, ...], dict[str, Any], tuple[str, ...]]) -> None:
    function.__defaults__, function.__kwdefaults__, cells, attributes, called = state
    if called:  # after a function that it wraps
        module, function.__name__, function.__qualname__ = called
        function.__module__ = take_module(module).__name__
    vars(function).update(attributes)
    if cells:  # the very ones that other functions have; Python itself has no way to put them into a function that is made
        set_closure(function, cells)


def make_cell() -> CellType:
    return CellType()


def fill_cell(cell: CellType, content: tuple[Any]) -> None:
    cell.cell_contents = content[0]


def bind_method(function: Any, owner: Any) -> MethodType:
    return MethodType(getattr(function, "__func__", function), owner)  # a class method stands bound under its name


def own_device(kind: str) -> torch.device:
    """Return the device of this process that stands for one of ComfyUI's process: see `rank.objects`."""
    return torch.device(kind)


def make_parameter(value: Tensor, requires_grad: bool) -> nn.Parameter:
    return as_parameter(value, requires_grad)


def make_small(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    if numbers:
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
    return made.to(device)


def make_dressed(cls: Any, value: Tensor, parameter: bool, requires_grad: bool) -> Tensor:
    made: Tensor = value.as_subclass(cls)
    return as_parameter(made, requires_grad) if parameter else made


def set_fields(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state)


def make_wrapped(
    cls: Any, parts: dict[str, Tensor], context: Any, size: tuple[int, ...], stride: Any, parameter: bool, requires_grad: bool
) -> Tensor:
    made: Tensor = cls.__tensor_unflatten__(parts, context, size, stride)
    return as_parameter(made, requires_grad) if parameter else made


def new_module(cls: Any) -> nn.Module:
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def fill_module(module: nn.Module, state: dict[str, Any]) -> None:
    for name in HOOKS:
        vars(module)[name].update(state.pop(name, {}))
    vars(module).update(state)


MAKERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        find, build_class, make_class, make_cell, fill_cell, make_function, fill_function, bind_method, own_device, take_module,
        make_parameter,
        make_small, make_dressed, set_fields, make_wrapped, new_module, fill_module,
    )
}  # fmt: skip
