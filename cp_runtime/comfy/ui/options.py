"""The ranks' part of a model's options: plain values of `transformer_options`, and a node's settings for `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor, device, dtype, strided
from torch.nn import Parameter

from ...engine.compiled import OPTIONS, CompileSettings
from ...errors import UnsupportedError
from ...pool.protocol import Unsent
from ..shared.modules import type_name

# Entries that only the UI process reads: functions, ids for its bookkeeping, and Wan-Animate 2's cache of what a forward computes
# anew without it.
UI_ONLY = ("wrappers", "callbacks", "uuids", "patches", "patches_replace", "prefetch_dynamic_vbars", "animate2_cache")
SENDABLE = (type(None), bool, int, float, str, Tensor, dtype, device, list, tuple, dict)
KEYS = (type(None), bool, int, float, str, tuple)  # of mappings

BACKENDS = ("inductor", "aot_eager", "eager")
MODES = (None, "default", "max-autotune-no-cudagraphs")
RECORDING = (
    "records what a device does and repeats it; attention inside of a block exchanges tokens with the other ranks, which cannot be "
    "repeated like that"
)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranks' entries, in a form that can be sent: see `sendable`."""
    return {name: sendable(value, f"transformer_options[{name!r}]") for name, value in options.items() if name not in UI_ONLY}


def sendable(value: Any, path: str) -> Any:
    """Return a value as messages carry it: a mapping becomes a dict, a set a sorted tuple, as forwards only test membership, and a
    number of NumPy's one of Python's. `Unsent` stands for what no message can carry: stock code may never read it."""
    if value is None or isinstance(value, (bool, int, float, str, dtype, device)):
        return value
    if isinstance(value, Tensor):
        if type(value) in (Tensor, Parameter) and value.layout is strided and value.device.type != "meta":
            return value
    elif isinstance(value, Mapping) and all(isinstance(key, KEYS) for key in value):
        return {key: sendable(item, f"{path}[{key!r}]") for key, item in value.items()}
    elif type(value) in (list, tuple):
        return type(value)(sendable(item, f"{path}[{i}]") for i, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        return sendable(tuple(sorted(value, key=repr)), path)
    elif isinstance(value, numpy.generic):
        return sendable(value.item(), path)
    return Unsent(f"{path}, an object of the class {type_name(type(value))}")


def compile_settings(asked: Mapping[str, Any]) -> CompileSettings:
    """Return the ranks' settings from `torch_compile_kwargs`. `fullgraph` is ignored: a block is compiled whole or not at all.
    Raises UnsupportedError if the ranks cannot compile like that."""
    backend, mode, dynamic = asked.get("backend"), asked.get("mode"), asked.get("dynamic")
    if backend == "cudagraphs":
        raise UnsupportedError(f"Torch Compile with backend cudagraphs {RECORDING}.", "Choose inductor.")
    if backend not in BACKENDS:
        raise UnsupportedError(f"Torch Compile: the workers do not have backend {backend!r}; they have {', '.join(BACKENDS)}.")
    if mode in ("reduce-overhead", "max-autotune"):
        remedy = "Choose default or max-autotune-no-cudagraphs."
        raise UnsupportedError(f"Torch Compile with mode {mode} {RECORDING}.", remedy)
    if mode not in MODES:
        raise UnsupportedError(f"Torch Compile: the workers do not know mode {mode!r}; they know {', '.join(map(str, MODES[1:]))}.")
    if dynamic not in (None, True, False):
        raise UnsupportedError(f"Torch Compile: dynamic is {dynamic!r}, and must be true, false or nothing.")
    options = {}
    for name, value in (asked.get("options") or {}).items():
        # Irrelevant here: they are about guards of a whole model, or off.
        if name == "guard_filter_fn" or (name == "triton.cudagraphs" and not value):
            continue
        if name == "triton.cudagraphs":
            raise UnsupportedError(f"Torch Compile with option {name} {RECORDING}.", "Switch it off.")
        if name not in OPTIONS or not isinstance(value, (bool, int)):
            raise UnsupportedError(
                f"Torch Compile: the workers do not take option {name}={value!r}; they take true, false or a number for "
                f"{', '.join(OPTIONS)}."
            )
        options[name] = value
    return CompileSettings(backend=backend, mode=mode, dynamic=dynamic, options=tuple(sorted(options.items())))
