"""Other numbers in the code of modules: for models whose constructors leave no choice of their sizes.

`support.models` builds with it, and `support.detection` in every process of a server under test.
"""

import importlib
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

FACE = {"comfy.ldm.wan.model_animate": {32: 8, 64: 12, 128: 16, 256: 24, 512: 48, 1024: 72}}
LYRIC_ENCODER = {"comfy.ldm.ace.lyric_encoder": {1024: 64, 4096: 128, 6: 2}}
LAYERS, HIDDEN = 8, 32
"""Of the language model that gives MiniMax Music 3 its conditioning."""
# Width, width with latents and the known, inner width, hidden width, layers. Three heads.
MUSIC = {"comfy.ldm.minimax_music.dit": {2048: 192, 2304: 448, 8192: 256, 4096: HIDDEN, 36: 2}}
AT_IMPORT = {**FACE, **LYRIC_ENCODER, **MUSIC}
"""Also in code that runs after a model is made: every process has these from the import on, as ranks load no file that names
them."""


def resize(modules: Mapping[str, Mapping[int, int]]) -> None:
    """Replace whole numbers in the functions of modules' own classes: what is done stays the same. Once is as good as twice.

    Args:
        modules: name, or `name:Class` for one class -> number in its code, or default of an argument -> number to put there.
    """
    for place, sizes in modules.items():
        name, _, only = place.partition(":")
        if sizes.keys() & {*sizes.values()}:
            raise ValueError(f"{sizes}: a number that is replaced must not replace another one")
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == name and only in ("", cls.__name__):
                for function in vars(cls).values():
                    if isinstance(function, FunctionType):
                        function.__code__ = _resized(function.__code__, sizes)
                        function.__defaults__ = tuple(_other(value, sizes) for value in function.__defaults__ or ()) or None


def _resized(code: CodeType, sizes: Mapping[int, int]) -> CodeType:
    constants = tuple(_other(constant, sizes) for constant in code.co_consts)
    return code.replace(co_consts=constants) if constants != code.co_consts else code  # compilers know code by its identity


def _other(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, CodeType):  # of a comprehension
        return _resized(value, sizes)
    if isinstance(value, tuple):  # arguments of a call
        return tuple(_other(each, sizes) for each in value)
    return sizes.get(value, value) if type(value) is int else value
