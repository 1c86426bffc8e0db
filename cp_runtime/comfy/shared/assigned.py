"""Names that code assigns as it runs: caches and counters, which change with use, not from outside."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from .origin import in_library

_PUTS = ("STORE_SUBSCR", "DELETE_SUBSCR", "COPY", "DUP_TOP_TWO")  # the last two, of `+=`: the container and the key, once more
_METHODS = ("LOAD_METHOD", "LOAD_ATTR")
_CHANGING = frozenset({
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
})  # fmt: skip


@functools.lru_cache(maxsize=1 << 16)
def names_in(body: CodeType) -> frozenset[str]:
    """Return the names that a function uses, of attributes and globals, with those of functions inside."""
    inner = (constant for constant in body.co_consts if isinstance(constant, CodeType))
    return frozenset(body.co_names).union(*map(names_in, inner))


@functools.lru_cache(maxsize=1 << 16)
def assigned(body: CodeType, *operations: str) -> frozenset[str]:
    """Return the names that a function assigns, with functions inside. `operations`: of Python's byte code, "STORE_ATTR"."""
    codes = {dis.opmap[each] for each in operations}
    # Every other byte is an operation. Most functions have none of these, and to decode one takes a millisecond.
    decoded = () if codes.isdisjoint(body.co_code[::2]) else dis.get_instructions(body)
    names = {str(each.argval) for each in decoded if each.opcode in codes}
    return frozenset(names).union(*(assigned(each, *operations) for each in body.co_consts if isinstance(each, CodeType)))


@functools.lru_cache(maxsize=1 << 16)
def filled(body: CodeType) -> frozenset[str]:
    """Return the globals that a function puts entries into, or takes out, with functions inside: `name[key] = value`,
    `name[key][other] += 1`, `name.append(value)`. Not where a key is more than one name or constant."""
    found, decoded = set[str](), list(dis.get_instructions(body))
    names, values = [*(each.opname for each in decoded), "", ""], [*(each.argval for each in decoded), None]
    for at in (at for at, name in enumerate(names) if name == "LOAD_GLOBAL"):
        key = at + 1
        while names[key + 1] == "BINARY_SUBSCR":  # a container inside
            key += 2
        if names[key + 1] in _PUTS or (names[key] in _METHODS and values[key] in _CHANGING):
            found.add(str(values[at]))
    return frozenset(found).union(*map(filled, (each for each in body.co_consts if isinstance(each, CodeType))))


@functools.cache
def set_later(cls: Any) -> frozenset[str]:
    """Return names that methods of a class assign, other than its constructor and what only that one calls."""
    methods: dict[str, list[CodeType]] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items() if not in_library(str(base.__module__)) else ():
            methods.setdefault(name, []).extend(_codes(value))
    uses = {name: frozenset[str]().union(*map(names_in, bodies)) for name, bodies in methods.items()}
    # The constructor and what it calls, directly or not; then without those that other methods call as well: they run later, too.
    first, more = {"__init__"}, {"__init__"}
    while more := uses.keys() & frozenset[str]().union(*(uses.get(name, ()) for name in more)) - first:
        first |= more
    while shared := {name for name in first - {"__init__"} if any(name in uses[each] for each in uses.keys() - first)}:
        first -= shared
    later = (body for name in methods.keys() - first for body in methods[name])
    return frozenset[str]().union(*(assigned(body, "STORE_ATTR") for body in later))


def _codes(value: Any) -> Iterator[CodeType]:
    for each in (value, *(getattr(value, part, None) for part in ("__func__", "fget", "fset", "__wrapped__", "func"))):
        if isinstance(each, FunctionType):
            yield each.__code__
