"""What patches note on a rank, said as plain data, and noted alike by the patches of another process."""

import math

import pytest
import torch
from torch import nn

from cp_runtime.comfy.shared.noted import Graph, Notes, apply, globals_of
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
        self.notes = Notes([self.patch, self.cache, self.shared], {"": {"steps": []}}, {"a_pack": {"_run": None}})
        self.graph = Graph(self.notes, {id(module): path for path, module in self.model.named_modules()})


@pytest.fixture
def both():
    return Process(), Process()


def say(there, here):
    kept = []
    words = there.graph.changes(there.notes, lambda tensor: kept.append(tensor) or len(kept) - 1)
    made = []

    def tensor(number, dtype, shape, on_host):
        made.append((dtype, shape, on_host))
        return kept[number]

    apply(words, here.graph, dict(here.model.named_modules()).__getitem__, tensor)
    return made


def test_nothing_is_said_where_nothing_was_noted(both):
    assert both[0].graph.changes(both[0].notes, None) == ""


def test_what_was_noted_is_noted_here(both):
    there, here = both
    residual = torch.ones(2, 3, dtype=torch.bfloat16)
    new = Cache()
    new.items = (1.5, math.inf, None, True, "a", {"deep": [torch.float16, {3, 4}]})
    there.patch(7)
    there.cache.calls, there.cache.inner["x"], there.cache.items[0] = 3, residual, there.cache
    del there.shared["old"]
    there.shared[(1, "k")] = [new, new]
    there.notes.attributes[""]["module"] = there.model[0]
    there.notes.attributes["0"] = {"noted": new}
    there.notes.globals["a_pack"]["_run"] = {"calls": 1}
    assert say(there, here) == [("bfloat16", [2, 3], True)]
    assert here.patch.__closure__[0].cell_contents is here.cache
    assert here.patch.__closure__[1].cell_contents == 7
    assert (here.cache.calls, here.cache.items) == (3, [here.cache, 2])
    assert here.cache.inner["x"] is residual
    assert list(here.shared) == [(1, "k")]
    one, other = here.shared[1, "k"]
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
        process.graph = Graph(process.notes, {})
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
        there.graph.changes(there.notes, lambda tensor: 0)


def test_patches_that_reach_something_else_here_are_an_error(both):
    there, here = both
    here.shared["more"] = Cache()
    here.graph = Graph(here.notes, {})
    there.cache.calls = 1
    with pytest.raises(MirrorError, match="reach something else"):
        say(there, here)


def test_globals_that_code_assigns_or_that_hold_something_travel(both):
    assert globals_of([both[0].patch]) == {__name__: {"_run": None, "CACHE": CACHE}}
