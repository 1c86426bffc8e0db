"""The ranks' part of a model's options: plain values of `transformer_options`, and a node's settings for `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, device, dtype

from ...engine.compiled import OPTIONS, CompileSettings
from ...errors import UnsupportedError

# Entries that only the UI process reads: functions, and ids for its bookkeeping.
UI_ONLY = ("wrappers", "callbacks", "uuids", "patches", "patches_replace", "prefetch_dynamic_vbars")
SENDABLE = (type(None), bool, int, float, str, Tensor, dtype, device, list, tuple, dict)

BACKENDS = ("inductor", "aot_eager", "eager")
MODES = (None, "default", "max-autotune-no-cudagraphs")
RECORDING = (
    "records what a device does and repeats it; attention inside of a block exchanges tokens with the other ranks, which cannot be "
    "repeated like that"
)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that can be sent. A mapping becomes a dict, and a set a tuple: forwards only test membership."""
    kept = {name: _sent(value) for name, value in options.items() if name not in UI_ONLY}
    return {name: value for name, value in kept.items() if isinstance(value, SENDABLE)}


def _sent(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    is_set = isinstance(value, (set, frozenset)) and all(isinstance(item, SENDABLE) for item in value)
    return tuple(sorted(value, key=repr)) if is_set else value


def compile_settings(asked: Mapping[str, Any]) -> CompileSettings:
    """Return the ranks' settings from `torch_compile_kwargs`. `fullgraph` is ignored: a block is compiled whole or not at all.
    Raises UnsupportedError if the ranks cannot compile like that."""
    backend, mode, dynamic = asked.get("backend"), asked.get("mode"), asked.get("dynamic")
    if backend == "cudagraphs":
        raise UnsupportedError(f"Torch Compile with backend cudagraphs {RECORDING}. Choose inductor.")
    if backend not in BACKENDS:
        raise UnsupportedError(f"Torch Compile: the workers do not have backend {backend!r}; they have {', '.join(BACKENDS)}.")
    if mode in ("reduce-overhead", "max-autotune"):
        raise UnsupportedError(f"Torch Compile with mode {mode} {RECORDING}. Choose default or max-autotune-no-cudagraphs.")
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
            raise UnsupportedError(f"Torch Compile with option {name} {RECORDING}. Switch it off.")
        if name not in OPTIONS or not isinstance(value, (bool, int)):
            raise UnsupportedError(
                f"Torch Compile: the workers do not take option {name}={value!r}; they take true, false or a number for "
                f"{', '.join(OPTIONS)}."
            )
        options[name] = value
    return CompileSettings(backend=backend, mode=mode, dynamic=dynamic, options=tuple(sorted(options.items())))
