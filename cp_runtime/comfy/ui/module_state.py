"""What the instances of a network's modules hold, against what its loader put there.

Ranks load the file by themselves. A node that sets an attribute of a layer (its padding, an epsilon), a method of one instance, a
layer in another's place, a hook or a buffer changes the network of this process only.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Collection, Iterator
from functools import cache
from itertools import chain
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...compat import children_of, global_hooks, hooks_of, slots
from ..shared.modules import BOOKKEEPING, STANDARD
from ..shared.weights import differing_weight, network_of, sample, sample_weights
from .sources import file_of, functions_in, in_library
from .target import notes_of

ABSENT = object()
ATTRIBUTE = "context_parallel_state"
SAVING = "state_dict"  # files.py replaces it, and nothing computes with it


class _Module(NamedTuple):
    """A module as it was loaded. Its attributes are those of its class's constructor; of containers, copies."""

    name: str
    module: weakref.ref[nn.Module]
    cls: type
    attributes: dict[str, Any]
    children: dict[str, nn.Module | None]
    buffers: dict[str, str]  # samples of their bytes


class ModuleState:
    """The state of a network at this moment, to compare with later. It does not keep the network alive, nor wait for garbage
    collection to go with it.

    Args:
        weights: sample the weights as well.
    """

    def __init__(self, network: nn.Module, weights: bool = False) -> None:
        self._network = weakref.ref(network)
        self._modules = [_note(name, module) for name, module in network.named_modules()]
        below = [module for module in network.modules() if module is not network]
        self._dicts = [held for module in below for held in (vars(module), children_of(module))]
        self._hooks = [hooks for module in below for hooks in hooks_of(module)]
        self._weights = sample_weights(network) if weights else {}
        self._seen: list[int] | None = None

    def change(self, patched: Collection[str] = (), again: bool = True) -> str:
        """Return a change in words: "padding_mode of decoder.conv_in"; empty without one.

        Args:
            patched: paths of attributes that ComfyUI has patched, and will restore.
            again: compare contents, and not only whether anything was assigned since the last comparison, which is fast.
        """
        if (network := self._network()) is None:
            return ""
        dicts, hooks = [vars(network), children_of(network), *self._dicts], [*hooks_of(network), *self._hooks]
        seen = [*map(id, chain.from_iterable(map(dict.values, dicts))), *map(len, hooks)]
        if not again and seen == self._seen and not any(global_hooks()):
            return ""
        found = next(self._changes(patched), "")
        if not found and self._weights and (weight := differing_weight(self._weights, sample_weights(network))) is not None:
            found = f"weight {weight}"
        self._seen = None if found else seen
        return found

    def _changes(self, patched: Collection[str]) -> Iterator[str]:
        if any(global_hooks()):
            yield "a hook on all modules"
        for noted in self._modules:
            module, where = noted.module(), noted.name or "the model"
            if module is None:  # another one is in its place, which its parent tells
                continue
            if type(module) is not noted.cls:
                yield f"the class of {where}, now {type(module).__qualname__}"
            if has_foreign_hooks(module):
                yield f"hooks of {where}"
            before, now = noted.children | noted.attributes, children_of(module) | _attributes(module)
            for name in {**before, **now}:
                old, new = before.get(name, ABSENT), now.get(name, ABSENT)
                if old is not new and not _equal(old, new) and f"{noted.name}.{name}".lstrip(".") not in patched:
                    stock = getattr(noted.cls, name, ABSENT)
                    # Other new names are a pack's notes, which nothing here reads. ComfyUI leaves the stock method after a patch.
                    if old is not ABSENT or (stock is not ABSENT and getattr(new, "__func__", new) is not stock):
                        yield f"{name} of {where}"
            if (buffer := differing_weight(noted.buffers, _buffers(module))) is not None:
                yield f"buffer {buffer} of {where}"


def state_of(model: Any) -> ModuleState:
    """Return the state of the network of a `BaseModel` or a VAE at the first call of this function, which follows its load."""
    notes = notes_of(model)
    if notes.state is None:
        notes.state = ModuleState(network_of(model))
    return notes.state


def change_of(network: nn.Module) -> str:
    """Return a change of a network that ranks get from this process, since the first call of this function for it, in words."""
    state = vars(network).get(ATTRIBUTE)
    if not isinstance(state, ModuleState):
        state = vars(network)[ATTRIBUTE] = ModuleState(network, weights=True)
    return state.change()


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether other code than this pack's has put hooks on a module."""
    return any(not getattr(hook, "sends_to_workers", False) for hooks in hooks_of(module) for hook in hooks.values())


def _note(name: str, module: nn.Module) -> _Module:
    attributes = {key: _copy(value) for key, value in _attributes(module).items()}
    return _Module(name, weakref.ref(module), type(module), attributes, dict(children_of(module)), _buffers(module))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a loader sets, without those that the class's own code sets later."""
    cls: Any = type(module)
    later = _set_later(cls)
    return {
        name: value
        for name, value in vars(module).items()
        if name not in STANDARD
        and name not in later
        and name != SAVING
        and not isinstance(value, Tensor)
        and not BOOKKEEPING.fullmatch(name)
        and not getattr(value, "sends_to_workers", False)  # ours, see interception.py
    }


def _buffers(module: nn.Module) -> dict[str, str]:
    return {name: sample(buffer) for name, buffer in slots(module)[1].items() if buffer is not None and buffer.device.type == "cpu"}


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal constants, or containers of the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(a is b or _equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] or _equal(one[key], other[key]) for key in one)
    return isinstance(one, (bool, int, float, complex, str, bytes, set, torch.dtype, torch.Size)) and one == other


@cache
def _set_later(cls: type) -> frozenset[str]:
    """Return names that methods of a class other than its constructor assign: caches, counters."""
    found: set[str] = set()
    for base in cls.__mro__:
        if in_library(file_of(base.__module__)):
            continue
        for name, value in vars(base).items():
            for function in functions_in(value) if name != "__init__" else ():
                found |= _assigned(function.__code__)
    return frozenset(found)


def _assigned(body: CodeType) -> set[str]:
    names = {str(each.argval) for each in dis.get_instructions(body) if each.opname == "STORE_ATTR"}
    return names.union(*map(_assigned, (each for each in body.co_consts if isinstance(each, CodeType))))
