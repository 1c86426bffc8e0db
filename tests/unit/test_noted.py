"""What patches note on a rank, said as plain data, and noted alike by the patches of another process."""

import functools
import itertools
import math
import pickle
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cp_runtime.comfy.shared.noted import Graph, Notes, apply, globals_of
from cp_runtime.comfy.shared.objects import write
from cp_runtime.errors import MirrorError

_run = None
CACHE = {}


class Cache:
    """A pack's object with notes."""

    def __init__(self):
        self.calls, self.items, self.inner = 0, [1, 2], {}


def begin(value):
    global _run
    _run = value


def made():
    """Return patches with all that they may note in, the same at every call, and their model."""
    count, cache, shared = 0, Cache(), {"old": 1}

    def patch(value):
        nonlocal count
        count = value
        return _run, cache, shared, CACHE

    model = nn.Sequential(nn.Linear(2, 2))
    return {"patch": patch, "cache": cache, "shared": shared, "model": model}


class Process:
    """One of two processes with the same patches."""

    def __init__(self):
        things = made()
        self.patch, self.cache, self.shared, self.model = (things[name] for name in ("patch", "cache", "shared", "model"))
        self.partial = functools.partial(self.patch, {"n": 0}, b=1)
        self.notes = Notes([self.patch, self.cache, self.shared, self.partial], {"": {"steps": []}}, {"a_pack": {"_run": None}})
        self.look()

    def look(self):
        self.graph = Graph(self.notes, {id(module): path for path, module in self.model.named_modules()})
        self.graph.look()


@pytest.fixture
def both():
    return Process(), Process()


def say(there, here):
    kept = []
    words = there.graph.changes(lambda tensor: kept.append(tensor) or len(kept) - 1)
    made = []

    def tensor(number, dtype, shape, strides, on_host):
        made.append((dtype, shape, strides, on_host))
        return kept[number]

    apply(words, here.graph, dict(here.model.named_modules()).__getitem__, tensor)
    return made


def test_nothing_is_said_where_nothing_was_noted(both):
    assert both[0].graph.changes(None) == ""


def test_what_was_noted_is_noted_here(both):
    there, here = both
    residual = torch.ones(2, 3, dtype=torch.bfloat16)
    new = Cache()
    new.items = (1.5, math.inf, None, True, "a", {"deep": [torch.float16, {3, 4}]})
    there.patch(7)
    there.cache.calls, there.cache.inner["x"], there.cache.items[0] = 3, residual, there.cache
    del there.shared["old"]
    there.shared[(1, ("k", torch.Size([2, 3])))] = [new, new]
    there.partial.args[0]["n"], there.partial.keywords["b"] = 1, torch.bfloat16
    there.notes.attributes[""]["module"] = there.model[0]
    there.notes.attributes["0"] = {"noted": new}
    there.notes.globals["a_pack"]["_run"] = {"calls": 1}
    assert say(there, here) == [("bfloat16", [2, 3], [3, 1], True)]
    assert here.patch.__closure__[0].cell_contents is here.cache
    assert here.patch.__closure__[1].cell_contents == 7
    assert (here.cache.calls, here.cache.items) == (3, [here.cache, 2])
    assert here.cache.inner["x"] is residual
    ((key, (one, other)),) = here.shared.items()
    assert (key, type(key[1][1])) == ((1, ("k", torch.Size([2, 3]))), torch.Size)
    assert (here.partial.args, here.partial.keywords) == (({"n": 1},), {"b": torch.bfloat16})
    assert one is other is here.notes.attributes["0"]["noted"]
    assert type(one) is Cache
    assert one.items == (1.5, math.inf, None, True, "a", {"deep": [torch.float16, {3, 4}]})
    assert (one.calls, one.inner) == (0, {})
    assert here.notes.attributes[""]["module"] is here.model[0]
    assert here.notes.globals == {"a_pack": {"_run": {"calls": 1}}}


def test_tensors_that_change_in_place_are_said_again(both):
    there, here = both
    for process in both:
        process.cache.inner["x"] = torch.zeros(2)
        process.look()
    there.cache.inner["x"].add_(1)
    assert len(say(there, here)) == 1
    assert here.cache.inner["x"].tolist() == [1.0, 1.0]


UNSAID = {
    "an object of a library": lambda p: p.shared.update(x=torch.Generator()),
    "a function": lambda p: p.shared.update(x=lambda: None),
    "a parameter": lambda p: p.shared.update(x=nn.Parameter(torch.zeros(2))),
    "a key that is an object": lambda p: p.shared.update({Cache(): 1}),
    "on a class": lambda p: setattr(Cache, "noted", object()),
    "on a function": lambda p: setattr(p.patch, "noted", 1),
    "a global that was not sent": lambda p: begin(object()),
}


@pytest.fixture
def undo():
    yield
    vars(Cache).get("noted") and delattr(Cache, "noted")
    begin(None)


@pytest.mark.parametrize("kind", UNSAID)
def test_what_cannot_be_said_is_an_error(kind, both, undo):
    there, _ = both
    UNSAID[kind](there)
    with pytest.raises(MirrorError, match="note"):
        there.graph.changes(lambda tensor: 0)


def test_patches_that_reach_something_else_here_are_an_error(both):
    there, here = both
    here.shared["more"] = Cache()
    here.look()
    there.cache.calls = 1
    with pytest.raises(MirrorError, match="reach something else"):
        say(there, here)


def test_globals_that_code_assigns_or_that_hold_something_travel(both):
    assert globals_of([both[0].patch]) == {__name__: {"_run": None, "CACHE": CACHE}}


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Named(dict):
    """A container with fields."""


def with_default():
    def patch(tensor=torch.zeros(1)):  # noqa: B008
        return tensor

    return patch


def module():
    made = nn.Module()
    made.calls = 0
    return made


def named():
    made = Named()
    made.calls = 0
    return made


IN_PLACE = {
    "a partial function": (lambda: functools.partial(print, bytearray(2)), lambda x: x.args[0].__setitem__(0, 1)),
    "a namespace": (lambda: SimpleNamespace(n=0), lambda x: setattr(x, "n", 1)),
    "a deque": (lambda: deque([1]), lambda x: x.append(2)),
    "a bytearray": (lambda: bytearray(2), lambda x: x.__setitem__(0, 1)),
    "a NumPy array": (lambda: torch.zeros(2).numpy(), lambda x: x.__setitem__(0, 1)),
    "an iterator": (itertools.count, next),
    "a module of torch": (module, lambda x: setattr(x, "calls", 1)),
    "fields of a dict": (named, lambda x: setattr(x, "calls", 1)),
    "a tensor in a tuple": (lambda: (torch.zeros(1),), lambda x: x[0].add_(1)),
    "a default": (with_default, lambda x: x().add_(1)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_changes_where_nobody_looks_is_an_error(kind, both):
    make, change = IN_PLACE[kind]
    there, _ = both
    there.shared["x"] = make()
    there.look()
    assert there.graph.changes(None) == ""
    change(there.shared["x"])
    with pytest.raises(MirrorError):
        there.graph.changes(lambda tensor: 0)


SAID = {
    "data": lambda x: x.data.add_(1),
    "NumPy": lambda x: x.numpy().__setitem__(0, 5),
}


@pytest.mark.parametrize("kind", SAID)
def test_changes_that_torch_does_not_count(kind, both):
    there, here = both
    for process in both:
        process.shared["x"] = torch.zeros(2)
        process.look()
    SAID[kind](there.shared["x"])
    assert len(say(there, here)) == 1
    assert here.shared["x"] is there.shared["x"]


def test_objects_with_slots(both):
    there, here = both
    for process in both:
        process.shared["x"] = Slots()
        process.look()
    there.shared["x"].calls = 3
    say(there, here)
    assert here.shared["x"].calls == 3


def test_tensors_that_share_memory_here_must_stay_as_they_are(both):
    there, _ = both
    there.shared["x"] = torch.zeros(2)
    there.notes = replace(there.notes, aliased=True)
    there.look()
    there.shared["x"].add_(1)
    with pytest.raises(MirrorError, match="in place"):
        there.graph.changes(lambda tensor: 0)


def test_functions_share_a_variable_there_as_here():
    count = 0

    def up():
        nonlocal count
        count += 1

    def read():
        return up, count

    up_there, read_there = pickle.loads(write([up, read]).data)  # noqa: S301
    up_there()
    assert read_there() == (up_there, 1)
    assert count == 0
