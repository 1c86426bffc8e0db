"""What ranks get of `transformer_options`: values that messages carry, besides patches and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, device, dtype

# Entries that only the UI process reads: functions, and ids for its bookkeeping.
UI_ONLY = ("wrappers", "callbacks", "uuids", "patches", "patches_replace", "prefetch_dynamic_vbars")
CONDITIONINGS = "cp_conditionings"  # entry that ranks get: for each of the batch's equal parts, a name of its conditioning
SENDABLE = (type(None), bool, int, float, str, Tensor, dtype, device, list, tuple, dict)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that can be sent. Forwards ask what is in a set, and so it becomes a tuple."""
    kept = {name: _sent(value) for name, value in options.items() if name not in UI_ONLY}
    return {name: value for name, value in kept.items() if isinstance(value, SENDABLE)}


def _sent(value: Any) -> Any:
    is_set = isinstance(value, (set, frozenset)) and all(isinstance(item, SENDABLE) for item in value)
    return tuple(sorted(value, key=repr)) if is_set else value
