"""Objects that functions and objects of node packs reach: in closures and fields, and as globals that their code names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .assigned import names_in
from .fingerprint import PLAIN, content_of, fields_of
from .modules import BOOKKEEPING, LOCALS, module_name
from .objects import is_ours
from .origin import in_library

COMFY = ("comfy", "comfy_extras", "comfy_api", "comfy_execution", "nodes", "latent_preview")
_OURS = __name__.partition(".comfy.")[0]
_FOLLOWED = (dict, list, tuple, set, frozenset, FunctionType, MethodType, CellType, partial)


def reached(roots: Iterable[Any], by_value: bool = False) -> list[Any]:
    """Return the functions, containers, objects and classes of packs that these reach, themselves included.

    `by_value`: without what belongs to functions and classes that go by name.
    """
    found: dict[int, Any] = {}
    left = list(roots)
    while left:
        value = left.pop()
        value = getattr(value, "stock", value) if is_ours(value) else value  # the ranks have the model's own method
        if id(value) not in found and not _is_left_out(value):
            found[id(value)] = value
            left += _parts(value, by_value)
    return list(found.values())


def functions_of_packs(roots: Iterable[Any]) -> list[FunctionType]:
    """Return the functions of packs that these reach."""
    return [each for each in reached(roots) if isinstance(each, FunctionType) and is_of_pack(str(each.__module__))]


def is_of_pack(module: str) -> bool:
    return not (module.partition(".")[0] in COMFY or "comfy_extras" in module or module.startswith(_OURS) or in_library(module))


class Global(NamedTuple):
    """A global of a pack, by its module's `module_name`."""

    module: str
    name: str
    value: Any
    namespace: dict[str, Any]


def named_globals(function: FunctionType) -> list[Global]:
    """Return the globals that a function of a pack names, those of other modules of packs included."""
    if not is_of_pack(str(function.__module__)):
        return []
    names, own = sorted(names_in(function.__code__)), function.__globals__
    modules = [each for name in names if isinstance(each := own.get(name), ModuleType) and is_of_pack(each.__name__)]
    spaces = {module_name(str(space.get("__name__"))): space for space in (own, *map(vars, modules))}
    return [Global(module, name, space[name], space) for module, space in spaces.items() for name in names if name in space]


def _is_left_out(value: Any) -> bool:
    """Return whether nothing of a value is code's to note in: plain data, modules and objects of ComfyUI and libraries."""
    if isinstance(value, type):
        return not is_of_pack(str(value.__module__))
    if isinstance(value, (*PLAIN, ModuleType, Tensor)):
        return True
    return not isinstance(value, _FOLLOWED) and (holds_a_model(value) or not is_of_pack(str(type(value).__module__)))


def own_fields(value: Any) -> dict[str, Any]:
    """Return the fields of an object of a pack; of a module without its weights, which ComfyUI moves, records of these, and
    what stands in the place of its forward for a call."""
    fields = fields_of(value)
    if not isinstance(value, nn.Module):
        return fields
    return {
        name: each for name, each in fields.items() if name not in ("_parameters", "forward") and not BOOKKEEPING.fullmatch(name)
    }


def holds_a_model(value: Any) -> bool:
    cls: Any = type(value)
    return any(base.__module__ == "comfy.model_patcher" for base in cls.__mro__)


def _parts(value: Any, by_value: bool) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, value.keywords]
    if isinstance(value, CellType):
        return [content_of(value)]
    if isinstance(value, type):
        held = [each for name, each in vars(value).items() if name != "__slotnames__"]  # those do not travel
        inside = [getattr(each, "__func__", getattr(each, "fget", each)) for each in held]
        return [] if by_value else [*inside, *value.__bases__]
    if not isinstance(value, FunctionType):
        return [type(value), *own_fields(value).values()]
    if by_value and LOCALS not in value.__qualname__:
        return []
    named = [] if by_value else [each.value for each in named_globals(value)]
    own = [each for each in named if not isinstance(each, FunctionType) or is_of_pack(str(each.__module__))]
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [*(value.__closure__ or ()), *defaults, *vars(value).values(), *own]
