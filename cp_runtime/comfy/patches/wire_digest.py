"""A check that weight patches arrived as they were sent. It imports no ComfyUI, unlike `wire_weights`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor


def weight_patches_digest(tree: Any, block: Tensor) -> str:
    """Return the SHA-256 of the patches as they travel: tree and tensor bytes."""
    digest = hashlib.sha256(json.dumps(tree, separators=(",", ":")).encode())
    digest.update(block.numpy().data)
    return digest.hexdigest()
