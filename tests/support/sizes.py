"""Other numbers in the code of a module: for models whose constructors leave no choice of their sizes. Imports nothing.

`support.models` builds with it, and `support.detection` in every process of a server under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any


def resize(module: Any, sizes: Mapping[int, int]) -> None:
    """Replace whole numbers in the functions of a module's own classes: what is done stays the same. Once is as good as twice."""
    if sizes.keys() & {*sizes.values()}:
        raise ValueError(f"{sizes}: a number that is replaced must not replace another one")
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            for function in vars(cls).values():
                if isinstance(function, FunctionType):
                    function.__code__ = _resized(function.__code__, sizes)


def _resized(code: CodeType, sizes: Mapping[int, int]) -> CodeType:
    def other(constant: Any) -> Any:
        if isinstance(constant, CodeType):  # of a comprehension
            return _resized(constant, sizes)
        return sizes.get(constant, constant) if type(constant) is int else constant

    constants = tuple(map(other, code.co_consts))
    return code.replace(co_consts=constants) if constants != code.co_consts else code  # compilers know code by its identity
