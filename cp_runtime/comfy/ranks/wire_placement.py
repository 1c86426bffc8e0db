"""Where the ranks keep a model's weights."""

from __future__ import annotations

from ...pool.config import WEIGHTS

WHOLE, SHARDED, OFFLOADED = PLACEMENTS = WEIGHTS[1:]
"""All of them on every device; 1/N of them on each; 1/N of them in the host's memory for each."""
