"""Objects that functions and objects of node packs reach: in closures and fields, and as globals that their code names."""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from .assigned import names_in
from .fingerprint import PLAIN, content_of, fields_of
from .origin import in_library

COMFY = ("comfy", "comfy_extras", "comfy_api", "comfy_execution", "nodes", "latent_preview")
_FOLLOWED = (dict, list, tuple, set, frozenset, FunctionType, MethodType, CellType)


def reached(roots: Iterable[Any]) -> list[Any]:
    """Return the functions, containers, objects and classes of packs that these reach, themselves included."""
    found: dict[int, Any] = {}
    left = list(roots)
    while left:
        value = left.pop()
        if id(value) not in found and not _is_left_out(value):
            found[id(value)] = value
            left += _parts(value)
    return list(found.values())


def is_of_pack(module: str) -> bool:
    return not (module.partition(".")[0] in COMFY or "comfy_extras" in module or in_library(module))


def named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function of a pack names."""
    if not is_of_pack(str(function.__module__)):
        return {}
    return {name: function.__globals__[name] for name in sorted(names_in(function.__code__) & function.__globals__.keys())}


def _is_left_out(value: Any) -> bool:
    """Return whether nothing of a value is code's to note in: plain data, modules and objects of ComfyUI and libraries."""
    if isinstance(value, type):
        return not is_of_pack(str(value.__module__))
    if isinstance(value, (*PLAIN, ModuleType, Tensor)):
        return True
    cls: Any = type(value)
    holds_a_model = any(base.__module__ == "comfy.model_patcher" for base in cls.__mro__)
    return not isinstance(value, _FOLLOWED) and (holds_a_model or not is_of_pack(str(cls.__module__)))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, CellType):
        return [content_of(value)]
    if isinstance(value, type):
        return [getattr(each, "__func__", each) for each in vars(value).values()]
    if not isinstance(value, FunctionType):
        return [type(value), *fields_of(value).values()]
    own = [each for each in named_globals(value).values() if not isinstance(each, FunctionType) or is_of_pack(str(each.__module__))]
    return [
        *(value.__closure__ or ()),
        *(value.__defaults__ or ()),
        *(value.__kwdefaults__ or {}).values(),
        *vars(value).values(),
        *own,
    ]
