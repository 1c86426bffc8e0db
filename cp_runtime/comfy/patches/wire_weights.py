"""Weight patches (LoRA and its relatives) as plain data and tensors, and back.

A patcher holds `{weight name: [(strength, patch, strength_model, offset, function)]}`. A patch is an adapter object of
`comfy.weight_adapter`, or a tuple of a kind and tensors. Both become tuples here; nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import comfy.utils
import comfy.weight_adapter

from ...errors import MirrorError

ADAPTERS = {adapter.__name__: adapter for adapter in comfy.weight_adapter.adapters}
FUNCTIONS = {"swap_scale_shift": comfy.utils.swap_scale_shift}


def encode_weight_patches(patches: dict[str, list[tuple[Any, ...]]]) -> list[Any]:
    """Encode a ModelPatcher's patches as nested lists and tuples of plain values and tensors.

    Raises:
        MirrorError: a patch is of a kind that the workers cannot rebuild; the message names it.
    """
    return [[key, [_encode(key, *entry) for entry in entries]] for key, entries in patches.items()]


def decode_weight_patches(encoded: list[Any]) -> dict[str, list[tuple[Any, ...]]]:
    """Invert `encode_weight_patches`. Raises MirrorError for an unknown adapter or function."""
    return {key: [_decode(*entry) for entry in entries] for key, entries in encoded}


def _encode(key: str, strength: float, patch: Any, strength_model: float, offset: Any, function: Any) -> tuple[Any, ...]:
    name = next((name for name, known in FUNCTIONS.items() if known is function), None)
    if function is not None and name is None:
        raise MirrorError(f"the patch of {key} transforms the weight with {function!r}, which cannot be sent to the workers")
    body: tuple[Any, ...]
    if type(patch) in ADAPTERS.values():
        body = ("adapter", type(patch).__name__, sorted(patch.loaded_keys), patch.weights)
    elif isinstance(patch, tuple) and len(patch) == 2 and isinstance(patch[0], str):
        body = ("tuple", *patch)
    elif isinstance(patch, tuple) and len(patch) == 1:
        body = ("tuple", "diff", patch)
    else:
        raise MirrorError(
            f"the patch of {key} is a {type(patch).__name__}, as model merging makes it; the workers take LoRA-like patches only. "
            "Save the merged model and load the file."
        )
    return (strength, body, strength_model, offset, name)


def _decode(strength: float, body: tuple[Any, ...], strength_model: float, offset: Any, function: str | None) -> tuple[Any, ...]:
    kind, name, *rest = body
    if function is not None and function not in FUNCTIONS:
        raise MirrorError(f"unknown weight function {function!r}")
    if kind == "tuple":
        patch: Any = (name, rest[0])
    elif kind == "adapter" and name in ADAPTERS:
        patch = ADAPTERS[name](set(rest[0]), rest[1])
    else:
        raise MirrorError(f"unknown weight adapter {name!r}")
    return (strength, patch, strength_model, offset, FUNCTIONS[function] if function else None)
