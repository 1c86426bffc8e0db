"""What tests on a server share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from support import families

INSIDE = "model.diffusion_model.conditioner."


@pytest.fixture(scope="session")
def as_checkpoint(checkpoints_dir: Path) -> Callable[[str], None]:
    """Offers the model of a family, by its name, to Load Checkpoint, which looks into a folder of its own."""
    served = families.served()

    def link(name: str) -> None:
        _, entry, table = served[name]
        file = families.checkpoint_of(entry)
        source, target = (checkpoints_dir / folder / file for folder in ("diffusion_models", "checkpoints"))
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            return
        if not table.conditioner:
            os.link(source, target)
            return
        # Checkpoints have these beside the model, not in it.
        with safe_open(source, "pt") as opened:
            tensors = {key.replace(INSIDE, "conditioner."): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            save_file(tensors, target, metadata=opened.metadata())

    return link
