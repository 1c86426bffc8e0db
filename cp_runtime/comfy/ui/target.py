"""A model as the UI process has it, and the check that every rank has the same one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ...errors import MirrorError
from ..wire.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model as the UI process has it: what the workers' mirror must equal."""

    recipe: Recipe
    key: str
    patches: dict[str, list[tuple[Any, ...]]] = field(repr=False)
    patches_uuid: str
    dtype: str
    cast_dtype: str

    @classmethod
    def of(cls, patcher: Any, recipe: Recipe) -> Target:
        """Describe a ModelPatcher."""
        return cls(
            recipe=recipe,
            key=recipe.key,
            patches=patcher.patches,
            patches_uuid=str(patcher.patches_uuid),
            dtype=str(patcher.model.get_dtype()),
            cast_dtype=str(patcher.model.manual_cast_dtype),
        )


def verify(target: Target, digest: str, replies: list[dict[str, Any]], pids: list[int]) -> None:
    """Compare what every rank reports about its mirror with the UI process's model.

    Raises:
        MirrorError: naming the rank, what differs and both values.
    """
    expected = {
        "digest": digest,
        "patches_uuid": target.patches_uuid,
        "dtype": target.dtype,
        "cast_dtype": target.cast_dtype,
    }
    for rank, reply in enumerate(replies):
        for name, value in expected.items():
            if reply[name] != value:
                raise MirrorError(
                    f"rank {rank} (pid {pids[rank]}) has {name} {reply[name]} for {os.path.basename(target.recipe.path)}; the UI "
                    f"process has {value}. All ranks must hold the same model: choose a weight_dtype that every device supports."
                )
