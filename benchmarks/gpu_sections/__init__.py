"""The sections of `gpu_check.py`: a function each, which reports what it sees."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from support.package import load_package

load_package()

GROUPS = {
    "gain": {"gain": 480},  # ends at once where there is one card
    "first": {"environment": 20, "kernels": 90, "streams": 40, "modes": 90, "nccl": 80, "nccl_ranks": 210},
    "second": {"comfy": 330, "vae": 200},
    "third": {"memory": 280, "faults": 250},
    "fourth": {"compiled": 300, "timing": 120},
    "several": {"several": 420},  # the same
}
"""Sections of groups that end within nine minutes each, and the seconds that a section may take."""
SECTIONS = {name: seconds for group in GROUPS.values() for name, seconds in group.items()}
MODULES = {"machine": ("environment", "nccl"), "ranks": ("modes", "nccl_ranks", "several"), "graphs": ("comfy", "vae", "compiled")}
"""Sections that are not in a module of their own name."""


def function_of(section: str) -> Callable[..., None]:
    """The function of a section: its name is the section's."""
    module = next((module for module, sections in MODULES.items() if section in sections), section)
    found: Callable[..., None] = getattr(importlib.import_module(f"{__name__}.{module}"), section)
    return found
