"""Weight patches (LoRA and its relatives, merges) by value.

A patcher holds `{weight name: [(strength, patch, strength_model, offset, function)]}`. A patch is an adapter object, a tuple of a
kind and tensors, or, of a merge, a list: a weight of the other model, beside a function that makes numbers of it, and the patches
of that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import MirrorError
from ..shared.objects import Written, write


def written_patches(patches: Mapping[str, Any]) -> Written:
    """Write weight patches. Raises MirrorError, naming the weight, if one cannot be sent."""
    try:
        return write(patches)
    except MirrorError:
        for name, entries in patches.items():
            try:
                write(entries)
            except MirrorError as error:
                raise MirrorError(f"the weight patch of {name} cannot be sent to the workers: {error}") from error
        raise


def code_of_weight_patches(patches: Mapping[str, Any]) -> set[str]:
    """Return the names of classes and functions that weight patches hold."""
    return set(written_patches(patches).all_code)
