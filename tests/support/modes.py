"""Kinds of a thing in ways to share a call: each kind in one of them in `make test`, in all of them in `make soak`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

SEQUENCE: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"world_size": 2, "ulysses_degree": 2},
    "ring 3": {"world_size": 3, "ring_degree": 3},
    "sharded": {"world_size": 2, "weights": "sharded"},
    "batch 2 x 2": {"world_size": 4, "batch_degree": 2},
}
"""Inputs of CP Config for a transformer."""


def by_turns(kinds: Iterable[str], every: int) -> list[Any]:
    """Cases for pytest: every second, third, ... kind in `make test`, all of them in `make soak`."""
    return [pytest.param(kind, marks=[pytest.mark.soak] if number % every else []) for number, kind in enumerate(kinds)]


def in_modes(kinds: Sequence[tuple[str, ...]], modes: Mapping[str, dict[str, Any]] = SEQUENCE, variants: int = 1) -> list[Any]:
    """Cases for pytest, `mode` and what a kind is, in the order of their ranks. `variants`: so many kinds in a row are one in
    several forms, of which `make test` takes one."""
    names, first = list(modes), range(0, len(kinds), variants)
    quick = {(number + turn % variants, turn % len(names)) for turn, number in enumerate(first)}
    return [
        pytest.param(
            mode,
            *kind,
            marks=[
                pytest.mark.ranks(modes[mode]["world_size"]),
                *([] if (number, names.index(mode)) in quick else [pytest.mark.soak]),
            ],
        )
        for mode in names
        for number, kind in enumerate(kinds)
    ]
