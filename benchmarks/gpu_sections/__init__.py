"""The sections of `gpu_check.py`, a module each: `run(section)` reports what it sees."""

from __future__ import annotations

GROUPS = {
    "first": {"environment": 20, "kernels": 90, "streams": 40, "modes": 90, "nccl": 80, "nccl_ranks": 210},
    "second": {"comfy": 330, "vae": 200},
    "third": {"memory": 280, "faults": 250},
    "fourth": {"compiled": 300, "timing": 120},
    "several": {"several": 480},  # ends at once where there is one card
}
"""Sections of groups that end within nine minutes each, and the seconds that a section may take."""
SECTIONS = {name: seconds for group in GROUPS.values() for name, seconds in group.items()}
