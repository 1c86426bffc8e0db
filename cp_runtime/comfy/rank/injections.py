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
from ...engine.ranks.collectives import RankGroup
from ...errors import PatchError
from ...families import splits_tokens
from ..shared.patches import listed, name_of
from ..shared.weights import READ_HERE
from .noted import NotesHere
from .whole_tokens import agree

OnAll = Callable[[str, Any], Any]
"""(path, function) -> the function, as it gets all tokens."""


@dataclass(frozen=True)
class Injections:
    """The injections of a call, in the order of their effect. `patcher`: of the model."""

    injections: Sequence[PatcherInjection]
    patcher: Any
    on_all: OnAll

    @contextmanager
    def in_place(self, model: nn.Module, notes: NotesHere | None, ranks: RankGroup) -> Iterator[None]:
        """Have them act on the model, while active. Raises PatchError: the ranks cannot compute with what they do.

        Args:
            notes: of code that no table lists.
            ranks: those that share the tokens.
        """
        if notes is not None and self.injections:
            with self._injected(model):
                pass  # ComfyUI injects with a load, the ranks with every call
            if notes.are_changed:
                raise PatchError("injected code notes something whenever it is injected")
        with self._injected(model) as (changed, undo):
            if notes is not None and not agree(ranks, " ".join(each.path for _, each in changed)):
                raise PatchError("not all workers inject the same")
            for _, each in changed:
                each.check(splits_tokens(model))
                for above in _from_top(each.path, model):
                    AS_THEY_ARE.add(above)
                    undo.callback(AS_THEY_ARE.discard, above)
            unlisted = [each for injection, each in changed if listed(injection.inject) is None]
            for path, module in dict(new for each in unlisted for new in each.new()).items():
                undo.callback(_put, module, vars(module).get("forward"))
                _put(module, self.on_all(path, module.forward))
            yield

    @contextmanager
    def _injected(self, model: nn.Module) -> Iterator[tuple[list[tuple[PatcherInjection, _Before]], ExitStack]]:
        """Inject, while active; yield the changed modules of each, and what is undone first."""
        with ExitStack() as undo:
            changed: list[tuple[PatcherInjection, _Before]] = []
            for injection in self.injections:
                before = [_Before(path, module) for path, module in model.named_modules()]
                for each in before:
                    undo.callback(each.restore)
                _run(injection.inject, self.patcher)
                undo.callback(_run, injection.eject, self.patcher)
                changed += [(injection, each) for each in before if each.is_changed]
            yield changed, undo


def _run(code: Callable[[Any], Any], patcher: Any) -> None:
    try:
        code(patcher)
    except Exception as error:
        raise PatchError(f"{name_of(code)} raised {type(error).__name__}: {error}") from error


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
        if rest[2:-1] != self._rest[2:-1]:
            raise PatchError(f"injected code changes the weights of {where}")
        if rest[-1] is not self._rest[-1]:
            raise PatchError(f"injected code changes the class of {where}")
        if f"{self.path}.".startswith(READ_HERE):
            raise PatchError(f"injected code changes {where}, with which ControlNets compute in ComfyUI's process")
        if rest[:2] != self._rest[:2] and (splits or not self.path):
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
    weights = ({name: id(weight) for name, weight in each.items()} for each in held)
    return vars(module).get("forward"), dict(module._modules), (*hooks, *weights, type(module))


def _put(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = forward
