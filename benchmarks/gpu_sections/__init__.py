"""The sections of `gpu_check.py`, a module each: `run(options, results)` reports what it sees."""

from __future__ import annotations

SECTIONS = {
    "environment": 20,
    "kernels": 75,
    "modes": 80,
    "nccl": 50,
    "streams": 30,
    "comfy": 100,
    "compiled": 100,
    "memory": 70,
    "faults": 65,
    "timing": 40,
    "several": 120,  # ends at once where there is one card
}
"""Seconds that each may take."""
