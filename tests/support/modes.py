"""Kinds of a thing in ways to share a call: each kind in one of them in `make test`, in all of them in `make soak`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

SEQUENCE: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"world_size": 2, "ulysses_degree": 2},
    "ring 3": {"world_size": 3, "ring_degree": 3},
    "sharded": {"world_size": 2, "weights": "sharded"},
    "batch 2 x 2": {"world_size": 4, "batch_degree": 2},
}
"""Inputs of CP Config for a transformer."""


def in_modes(kinds: Sequence[tuple[str, ...]], modes: Mapping[str, dict[str, Any]] = SEQUENCE) -> list[Any]:
    """Cases for pytest, `mode` and what a kind is, in the order of their ranks."""
    names = list(modes)
    return [
        pytest.param(
            mode,
            *kind,
            marks=[
                pytest.mark.ranks(modes[mode]["world_size"]),
                *([] if number % len(names) == names.index(mode) else [pytest.mark.soak]),
            ],
        )
        for mode in names
        for number, kind in enumerate(kinds)
    ]
