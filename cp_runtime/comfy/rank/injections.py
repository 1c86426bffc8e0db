"""Code that nodes inject into a model, on a rank: it is there for the time of a call. ComfyUI has it there as long as the model is
loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from comfy.patcher_extension import PatcherInjection
from torch import nn

from ...compat import hooks_of
from ...engine.compiled import AS_THEY_ARE
from ...errors import PatchError
from ...families import splits_tokens
from ..shared.patches import MIRRORED, name_of
from ..shared.weights import READ_HERE

OnAll = Callable[[str, Any], Any]
"""(path, function) -> the function, as it gets all tokens."""


@dataclass(frozen=True)
class Injections:
    """The injections of a call, in the order of their effect. `patcher`: of the model."""

    injections: Sequence[PatcherInjection]
    patcher: Any
    on_all: OnAll

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Have them act on the model, while active. Raises PatchError: the ranks cannot compute with what they do."""
        with ExitStack() as undo:
            for injection in self.injections:
                before = [_Before(path, module) for path, module in model.named_modules()]
                for each in before:
                    undo.callback(each.restore)
                undo.callback(injection.eject, self.patcher)
                _inject(injection, self.patcher)
                for each in [each for each in before if each.is_changed]:
                    each.check(splits_tokens(model))
                    for path, module in each.new() if name_of(injection.inject) not in MIRRORED else ():
                        undo.callback(_put, module, vars(module).get("forward"))
                        _put(module, self.on_all(path, module.forward))
                    for above in _from_top(each.path, model):
                        AS_THEY_ARE.add(above)
                        undo.callback(AS_THEY_ARE.discard, above)
            yield


def _inject(injection: PatcherInjection, patcher: Any) -> None:
    try:
        injection.inject(patcher)
    except Exception as error:
        raise PatchError(f"{name_of(injection.inject)} raised {type(error).__name__}: {error}") from error


def _from_top(path: str, model: nn.Module) -> Iterator[nn.Module]:
    parts = path.split(".")
    return (model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts) + 1))


class _Before:
    """A module before an injection."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self._module = path, module
        self._forward, self._inside, self._rest = _state(module)

    @property
    def is_changed(self) -> bool:
        return _state(self._module) != (self._forward, self._inside, self._rest)

    def new(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with another forward now, by path: those in the place of others, and this one."""
        for name, each in self._module._modules.items():
            if each is not None and each is not self._inside.get(name):
                yield f"{self.path}.{name}".lstrip("."), each
        if vars(self._module).get("forward") is not self._forward:
            yield self.path, self._module

    def check(self, splits: bool) -> None:
        """Raise PatchError if a call cannot compute with the change. `splits`: ranks have a part of the tokens each."""
        where, (*_, rest) = self.path or "the transformer", _state(self._module)
        if rest[2:] != self._rest[2:]:
            raise PatchError(f"injected code changes the weights of {where}")
        if f"{self.path}.".startswith(READ_HERE):
            raise PatchError(f"injected code changes {where}, with which ControlNets compute in ComfyUI's process")
        if rest != self._rest and (splits or not self.path):
            raise PatchError(f"injected code put a hook on {where}")
        for path, module in self.new():
            if module is not self._module and splits and next(module.children(), None) is not None:
                raise PatchError(f"injected code replaced {path}, and has modules inside that may lack tokens")
            if not path:
                raise PatchError("injected code replaced the forward of the transformer")

    def restore(self) -> None:
        _put(self._module, self._forward)
        self._module._modules = dict(self._inside)


def _state(module: nn.Module) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """Return the forward of a module's own, the modules inside, and its hooks and weights."""
    hooks, held = map(len, hooks_of(module)), (module._parameters, module._buffers)
    return vars(module).get("forward"), dict(module._modules), (*hooks, *({k: id(v) for k, v in each.items()} for each in held))


def _put(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = forward
