"""Notes on a model of the UI process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...controller.placement import Demand
from ...pool.messages import Described
from ..shared.values import Value

Asking = Callable[[Collection[str]], Sequence[Described]]
"""Asks the ranks what they compute with, after they have imported these packs as well."""
ATTRIBUTE = "context_parallel_notes"
ON_RANKS = "context_parallel_on_ranks"
"""Stands for the id of the weight patches in a model (`current_weight_patches_uuid`): its weights are on the ranks. Any patcher of
ComfyUI that loads the model then takes this for another state of the weights and replaces it."""


@dataclass
class ModelNotes:
    """Notes on a `BaseModel`.

    Args:
        key: of its value, once the controller counts this model as a user of it.
        name, kind: see `names`.
        local: it runs in this process on one device, although the graph has ranks for it.
        demand: of its weights alone.
        run: number of the sampling run in which it was last looked at as a whole.
        found: its value then, or since.
    """

    key: str = ""
    name: str = ""
    kind: str = ""
    local: bool = False
    demand: Demand | None = None
    run: object = None
    found: Value | None = None


def notes_of(model: Any) -> ModelNotes:
    """Return the notes on a `BaseModel`; they are created at first use."""
    notes = vars(model).get(ATTRIBUTE)
    if not isinstance(notes, ModelNotes):
        notes = ModelNotes()
        setattr(model, ATTRIBUTE, notes)
    return notes


def on_ranks(model: Any) -> bool:
    """Return whether the weights of a model are on the ranks, so that it must not compute here."""
    return getattr(model, "current_weight_patches_uuid", None) == ON_RANKS
