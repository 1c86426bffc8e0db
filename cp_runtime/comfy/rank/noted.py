"""What patches note between calls, on a rank: it comes with a call, stands in its place for the time of it, and goes back as words.
Only tensors stay, until ComfyUI's process needs them no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import MirrorError
from ..shared.attributes import attributes_of, set_attributes
from ..shared.modules import take_module
from ..shared.noted import Graph, Notes

PER_CALL = 1 << 20  # tensors


class HeldTensors:
    """Tensors that patches have noted, by numbers that are the same on all ranks."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._calls, self._numbers = 0, itertools.count()

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._tensors:
            raise MirrorError("a tensor that patches noted in an earlier call is not on the workers any more")
        return self._tensors[number]

    def number_of(self, tensor: Tensor) -> int:
        """Keep a tensor; return its number."""
        number = next((number for number, each in self._tensors.items() if each is tensor), None)
        number = next(self._numbers) if number is None else number
        self._tensors[number] = tensor
        return number

    def begin(self, dropped: Iterable[int], is_repeated: bool, restores: bool = False) -> None:
        """Begin a call.

        Args:
            dropped: numbers that nobody needs any more.
            is_repeated: `as_before` or `restores` may follow.
            restores: have the tensors be as they were before the last call.
        """
        if restores:
            self._tensors |= self._before
        self._calls += 1
        self._numbers = itertools.count(self._calls * PER_CALL)  # another rank may have numbered more or fewer in the last one
        for number in dropped:
            self._tensors.pop(number, None)
        self._before = {number: tensor.clone() for number, tensor in self._tensors.items()} if is_repeated else {}

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Have the tensors be as they were before the last call, while active: patches may change them in place."""
        now, self._tensors = self._tensors, {**self._tensors, **self._before}
        try:
            yield
        finally:
            self._tensors = now


HELD = HeldTensors()


class NotesHere:
    """What the patches of a call have noted before it."""

    def __init__(self, notes: Notes, model: nn.Module) -> None:
        self._notes, self._modules = notes, dict(model.named_modules())
        self._overwritten: list[str] = []
        self.wrote: list[str] = []
        self._graph: Graph | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have attributes and globals be as noted, while active; note them then."""
        notes, before = self._notes, {path: attributes_of(module) for path, module in self._modules.items()}
        inside = {path: (dict(module._modules), {*module._buffers}) for path, module in self._modules.items()}
        spaces: dict[str, dict[str, Any]] = {module: take_module(module).__dict__ for module in notes.globals}
        globals_before = {module: {name: spaces[module].get(name) for name in held} for module, held in notes.globals.items()}
        for path, attributes in notes.attributes.items():
            self._modules[path].__dict__.update(attributes)
        for module, held in notes.globals.items():
            spaces[module].update(held)
        self._graph = Graph(notes, {id(module): path for path, module in self._modules.items()})  # with these globals
        self._graph.look()
        try:
            yield
        finally:
            for path, module in self._modules.items():
                own, now = before[path], attributes_of(module)
                self._overwritten += [f"{name} of {path}" for name in own if now.get(name, own) is not own[name]]
                if (module._modules, module._buffers.keys()) != inside[path]:
                    self._overwritten.append(f"the modules and buffers in {path or 'the model'}")
                    module._modules = inside[path][0]
                _refill(notes.attributes, path, {name: value for name, value in now.items() if name not in own})
                set_attributes(module, own)
            for name, held in notes.globals.items():
                held.update({each: spaces[name].get(each) for each in held})
                spaces[name].update(globals_before[name])

    @property
    def are_changed(self) -> bool:
        """Whether something has changed since the call began."""
        try:
            return bool(self._graph is not None and self._graph.changes(lambda tensor: 0))
        except MirrorError:
            return True

    def told(self) -> dict[str, Any]:
        """Return what has changed, as `CallOutcome` has it."""
        if self._graph is None:
            return {}
        told: dict[str, Any] = {"wrote": tuple(self.wrote)}
        if self._overwritten:
            return told | {"unsaid": f"they change {self._overwritten[0]}, a part of the model"}
        try:
            return told | {"noted": self._graph.changes(HELD.number_of)}
        except MirrorError as error:
            return told | {"unsaid": str(error)}


def _refill(attributes: dict[str, dict[str, Any]], path: str, now: dict[str, Any]) -> None:
    if now or path in attributes:
        held = attributes.setdefault(path, {})
        held.clear()
        held.update(now)
