"""Where patches of other nodes may note something for the next call, besides in themselves: modules of the model, globals and
classes of packs."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn

from ..shared.assigned import set_later
from ..shared.modules import BOOKKEEPING
from ..shared.objects import STANDARD, is_ours
from ..shared.reached import named_globals, reached

_FORWARD = "forward"  # replaced for the time of a call


def attributes_of(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the attributes of a model's modules that ComfyUI does not set by itself."""
    return [(module, _attributes(module)) for module in model.modules()]


def restore(held: Iterable[tuple[nn.Module, dict[str, Any]]]) -> bool:
    """Have attributes be as they were; return whether they were others."""
    changed = False
    for module, before in held:
        now = _attributes(module)
        if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
            changed = True
            for name in now.keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
    return changed


def globals_of(things: Any) -> list[object]:
    """Return what the globals and classes of packs hold that the code of patches names."""
    held: list[object] = []
    for value in reached([things]):
        if isinstance(value, FunctionType):
            for name, each in sorted(named_globals(value).items()):
                held.append((name, id(each), *_inside(each)))
        elif isinstance(value, type):
            held.append([(name, id(each), *_inside(each)) for name, each in sorted(vars(value).items())])
    return held


def _inside(value: Any) -> tuple[object, ...]:
    if isinstance(value, dict):
        return tuple((id(key), id(each)) for key, each in value.items())
    return tuple(map(id, value)) if isinstance(value, (list, set)) else ()


def _attributes(module: nn.Module) -> dict[str, Any]:
    cls: Any = type(module)
    later = set_later(cls)
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in STANDARD or name in later or name == _FORWARD or BOOKKEEPING.fullmatch(name) or is_ours(value))
    }
