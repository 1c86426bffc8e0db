"""Other numbers in the code of modules: for models whose constructors leave no choice of their sizes.

`support.models` builds with it, and `support.detection` in every process of a server under test.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any

_known: dict[str, Mapping[int, int]] = {}
_code_of = SourceFileLoader.get_code


def _get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
    """The code of a file as if it had been written with these numbers: the extension compares it with what is there."""
    code, sizes = _code_of(loader, name), _known.get(name)
    if code is None or sizes is None:
        return code
    constants = (_resized(c, sizes) if isinstance(c, CodeType) and not c.co_flags & 1 else c for c in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def resize(modules: Mapping[str, Mapping[int, int]]) -> None:
    """Replace whole numbers in the functions of modules' own classes: what is done stays the same. Once is as good as twice.

    Args:
        modules: name -> number in its code, or default of an argument -> number to put there.
    """
    if modules:
        _forget()
    for name, sizes in modules.items():
        if sizes.keys() & {*sizes.values()}:
            raise ValueError(f"{sizes}: a number that is replaced must not replace another one")
        module, known = importlib.import_module(name), _known.get(name, {})
        _known[name] = {**known, **sizes}
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == name:
                for function in vars(cls).values():
                    if isinstance(function, FunctionType):
                        function.__code__ = _resized(function.__code__, sizes)
                        function.__defaults__ = tuple(_other(value, sizes) for value in function.__defaults__ or ()) or None


def _forget() -> None:
    SourceFileLoader.get_code = _get_code  # type: ignore[assignment, method-assign]
    for name, module in list(sys.modules.items()):
        if name.endswith(".comfy.ui.sources"):
            module.source_of.cache_clear()


def _resized(code: CodeType, sizes: Mapping[int, int]) -> CodeType:
    constants = tuple(_other(constant, sizes) for constant in code.co_consts)
    return code.replace(co_consts=constants) if constants != code.co_consts else code  # compilers know code by its identity


def _other(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, CodeType):  # of a comprehension
        return _resized(value, sizes)
    if isinstance(value, tuple):  # arguments of a call
        return tuple(_other(each, sizes) for each in value)
    return sizes.get(value, value) if type(value) is int else value
