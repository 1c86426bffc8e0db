"""Notes on a model of the UI process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...controller.placement import Demand
from ...pool.messages import Described
from ..shared.files import ModelFiles
from ..shared.recipe import FileStamp, Recipe
from ..shared.state import State

if TYPE_CHECKING:
    from .recipes import NodeCall

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
        stamps: of its file, before and after ComfyUI loaded it; None = by no loader that `recipes` watches.
        call: of the node that loaded it, if its loader leaves no recipe.
        recipe: the `cached_patcher_init` that the recipe was read from, and the recipe.
        key: of the recipe, once the controller counts this model as a user of it.
        files: the recipe that the ranks have loaded it by, or will; the name of its file, and its files.
        local: it runs in this process on one device, although the graph has ranks for it.
        shares_file: whether its plain weights are the pages of its file.
        demand: of its weights alone.
        classes: of its network's modules, when it was loaded.
        state: of its network's modules, when it was loaded.
        samples: of its weights, when the ranks' were compared with them; of none before.
        places: of its weights in memory, when the run began.
        run: number of the sampling run in which they were compared again.
    """

    stamps: tuple[FileStamp, FileStamp] | None = None
    call: NodeCall | None = None
    recipe: tuple[Any, Recipe] | None = None
    key: str = ""
    files: tuple[Recipe, str, ModelFiles] | None = None
    local: bool = False
    shares_file: bool = False
    demand: Demand | None = None
    classes: frozenset[type] = frozenset()
    state: State | None = None
    samples: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    run: object = None


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
