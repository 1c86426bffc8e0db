"""Who called torch, and with which tensors."""

import functools
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor

HERE = os.path.dirname(__file__) + os.sep
DEPTH = 6  # callers that a report names


@functools.cache
def _is_outside(file: str) -> bool:
    return not file.startswith(HERE) and "/torch/" not in file


def callers() -> Iterator[Any]:
    """Frames of who called torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _is_outside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place() -> str:
    """The last callers outside of torch, the innermost one at the end."""
    frames = itertools.islice(callers(), DEPTH)
    return "".join(reversed(traceback.format_list([(f.f_code.co_filename, f.f_lineno, f.f_code.co_name, None) for f in frames])))


def flat(value: Any) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
