"""Test-only nodes for ComfyUI: conditioning and latents without text encoders, and model patches of every kind.

Loaded by the server under test, never by pytest. All random content comes from the `seed` of the node alone.
"""

import gc

from . import (  # noqa: F401  (they make nodes)
    attention,
    caches,
    changed,
    conditioning,
    encoders,
    latent,
    loaders,
    model_patch,
    on_tokens,
    patch,
    processes,
    stand_ins,
    unlisted,
)
from .node import NODE_CLASS_MAPPINGS

gc.freeze()  # ComfyUI collects garbage between prompts, and these are always the same modules

__all__ = ["NODE_CLASS_MAPPINGS"]
