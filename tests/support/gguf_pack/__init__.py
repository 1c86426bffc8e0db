"""A node pack that loads files of blocks of bytes, with the classes and habits of the packs that load GGUF files.

A file is one of safetensors under the name of a GGUF file: `support.gguf_files` writes it. Blocks are of 32 numbers, 8 bits each,
and a scale.
"""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
