"""Test-only nodes for ComfyUI: conditioning and latents without text encoders, and model patches of every kind.

Loaded by the server under test, never by pytest. All random content comes from the `seed` of the node alone.
"""

import gc
import importlib
from pathlib import Path

from .node import NODE_CLASS_MAPPINGS

for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    importlib.import_module(f".{path.stem}", __name__)
gc.freeze()  # ComfyUI collects garbage between prompts, and these are always the same modules

__all__ = ["NODE_CLASS_MAPPINGS"]
