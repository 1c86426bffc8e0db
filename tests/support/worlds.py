"""How many ranks a test on the shared server asks for."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def on_ranks(world: int, *values: Any, id: str | None = None, soak: bool = False) -> Any:
    """Parameters of a test that runs on `world` ranks, which is the last of them; with `soak` in `make soak` only."""
    return pytest.param(*values, world, marks=[pytest.mark.ranks(world), *([pytest.mark.soak] if soak else [])], id=id)


def alternate(names: Iterable[str], worlds: tuple[int, ...] = (2, 3), soak: Collection[str] = ()) -> list[Any]:
    """(name, number of ranks) for every name, the numbers by turns. `soak`: names for `make soak` only.

    Enough where the cases differ in what crosses to the ranks, and not in how many there are: tests/ranks has every number.
    """
    turns = [(name, worlds[number % len(worlds)]) for number, name in enumerate(names)]
    return [on_ranks(world, name, id=f"{name}-{world} ranks", soak=name in soak) for name, world in turns]
