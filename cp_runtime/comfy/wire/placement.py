"""Where the ranks keep a model's weights."""

from __future__ import annotations

WHOLE, SHARDED, OFFLOADED = PLACEMENTS = ("whole", "sharded", "offloaded")
"""All of them on every device; 1/N of them on each; 1/N of them in the host's memory for each."""
