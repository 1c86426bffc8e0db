"""What patches have noted so far, in ComfyUI's process: here as in a stock run, so that nodes can read it and reset it.

Also what stands in a transformer in the place of its own forwards and modules, for a call or for longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...controller.calls import Keeper
from ...errors import ON_ONE_DEVICE, UnsupportedError
from ..shared.attributes import attributes_of
from ..shared.modules import take_module
from ..shared.noted import Graph, Notes, apply, globals_of, put, tensors_in
from ..shared.objects import ABSENT, is_ours
from ..shared.weights import PREFIX
from .fingerprints import OF_MODEL
from .held import Held, held_by, is_gone

REMEDY = f"Remove that node, or {ON_ONE_DEVICE}."
METHODS = ("forward", "_forward")
"""The innermost forward is one of these."""
FORWARDS = (*METHODS, "forward_orig")


class AsLoaded(NamedTuple):
    """A transformer as it was loaded: its own modules by path, without itself, and their attributes."""

    modules: Mapping[str, nn.Module]
    attributes: Mapping[str, frozenset[str]]


_LOADED: WeakKeyDictionary[nn.Module, AsLoaded] = WeakKeyDictionary()
_FIRST: dict[tuple[str, str], Any] = {}
"""Globals of packs as they were before patches noted something there, by `module_name` and name."""
_NOTED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Attributes of modules that patches have noted: no part of the model."""
_FOR_GOOD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a node has replaced something in the model itself, where it stays without the node."""


def innermost_method(model: nn.Module) -> str:
    """Return `_forward` if the class calls it through ComfyUI's wrappers, else `forward`."""
    return "_forward" if hasattr(type(model), "_forward") else "forward"


def loaded(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Remember a transformer as it is loaded. `before`: what was in the place of object patches, by path."""
    modules = {path: module for path, module in model.named_modules() if path}
    for name, own in before.items():
        if isinstance(own, nn.Module):
            modules = {path: module for path, module in modules.items() if not f"{path}.".startswith(f"{name}.")}
            modules |= {f"{name}.{path}".rstrip("."): module for path, module in own.named_modules()}
    attributes = {path: frozenset(attributes_of(module)) for path, module in [("", model), *modules.items()]}
    _LOADED[model] = AsLoaded(modules, attributes)


def paths_of(model: nn.Module) -> dict[int, str]:
    """Return the paths of a transformer's modules, as it was loaded, by their id."""
    known = _LOADED.get(model)
    modules = dict(model.named_modules()) if known is None else {"": model, **known.modules}
    return {id(module): path for path, module in modules.items()}


def replaced_in(model: nn.Module) -> dict[str, Any]:
    """Return what stands in a transformer in the place of its own forwards and modules."""
    found = {name: own for name in FORWARDS if (own := vars(model).get(name)) is not None and not _is_stock(model, name, own)}
    if (known := _LOADED.get(model)) is not None:
        found |= {name: module for name, module in model._modules.items() if module is not known.modules.get(name)}
    return found


def note_changes(patcher: Any) -> None:
    """Note whether anything is replaced in the model between two calls, other than by object patches: for good, then."""
    replaced = {f"{PREFIX}{name}" for name in replaced_in(patcher.model.diffusion_model)}
    _FOR_GOOD[patcher.model.diffusion_model] = not replaced <= patcher.object_patches_backup.keys()


def remedy(model: nn.Module) -> str:
    """Return what helps where the patches of a model are refused."""
    return OF_MODEL if _FOR_GOOD.get(model) else REMEDY


def _is_stock(model: nn.Module, name: str, own: Any) -> bool:
    """ComfyUI leaves the stock method there when it undoes a patch."""
    return is_ours(own) or getattr(own, "__func__", None) is getattr(type(model), name, None)


def originals_of(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Return what stood in the place of `replaced_in` and of notes, by the id of the module, then by name."""
    known = _LOADED.get(model)
    modules = [model, *(known.modules.values() if known is not None else ())]
    found = {id(module): dict.fromkeys(names, ABSENT) for module in modules if (names := _NOTED.get(module))}
    own = {} if known is None else known.modules
    replaced = {name: own.get(name, ABSENT) for name in replaced_in(model)}
    return {**found, id(model): {**found.get(id(model), {}), **replaced}} if replaced else found


@dataclass(frozen=True)
class NotedHere:
    """What some patches of a transformer have noted.

    Args:
        device: of the model.
        notes: what they have noted so far.
        graph: of that.
    """

    model: nn.Module
    device: torch.device
    notes: Notes
    graph: Graph

    @classmethod
    def by(cls, patches: Sequence[Any], model: nn.Module, device: torch.device, can_be_sent: Callable[[Any], bool]) -> NotedHere:
        known = _LOADED[model]
        attributes: dict[str, dict[str, Any]] = {}
        for path, module in [("", model), *known.modules.items()]:
            names, now = _NOTED.get(module, set()), attributes_of(module)
            added = {name: now[name] for name in now if name in names or name not in known.attributes[path]}
            for name in [name for name, value in added.items() if any(is_gone(each) for *_, each in tensors_in([value]))]:
                delattr(module, name)  # the cache begins anew, as it did at first
                del added[name]
            kept = {name: value for name, value in added.items() if name not in FORWARDS and can_be_sent(value)}
            if kept:
                attributes[path] = kept
                _NOTED.setdefault(module, set()).update(kept)
        found = globals_of(patches)
        for space, values in found.items():
            for name in [name for name, value in values.items() if any(is_gone(each) for *_, each in tensors_in([value]))]:
                values[name] = vars(take_module(space))[name] = _FIRST[space, name]  # as after a restart of ComfyUI
        held = {space: {name: value for name, value in values.items() if can_be_sent(value)} for space, values in found.items()}
        notes = Notes(patches, attributes, {space: values for space, values in held.items() if values})
        for holder, key, each in tensors_in(notes.roots):
            if isinstance(each, Held) and each.is_here:
                put(holder, key, each.here())
        for path, values in attributes.items():
            vars(model if not path else known.modules[path]).update(values)
        tensors = {id(each): each for *_, each in tensors_in(notes.roots)}.values()
        memory = Counter(each.untyped_storage().data_ptr() for each in tensors if type(each) is torch.Tensor)
        notes = replace(notes, aliased=any(count > 1 for count in memory.values()))
        if any(map(is_gone, tensors)):
            raise UnsupportedError(
                "what patches noted on the workers is gone, as these have been restarted since. Have the node that patches run "
                "again, by changing one of its inputs."
            )
        return cls(model, device, notes, Graph(notes, paths_of(model)))

    def take(self, words: str, keeper: Keeper) -> None:
        """Note what the ranks have noted. Raises MirrorError: that cannot be said here."""
        modules, notes = {"": self.model, **_LOADED[self.model].modules}, self.notes
        before = {path: set(held) for path, held in notes.attributes.items()}
        apply(words, self.graph, modules.__getitem__, held_by(keeper, self.device))
        for path, held in notes.attributes.items():
            module = modules[path]
            for name in before.get(path, set()) - held.keys():
                vars(module).pop(name, None)
            vars(module).update(held)
            _NOTED.setdefault(module, set()).update(held)
        for space, values in notes.globals.items():
            names = vars(take_module(space))
            for name in values:
                _FIRST.setdefault((space, name), names[name])
            names.update(values)
