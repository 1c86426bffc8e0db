"""The sections of `gpu_check.py`, a module each: `run(options, results)` reports what it sees."""

from __future__ import annotations

SECTIONS = {
    "environment": 15,
    "kernels": 60,
    "modes": 60,
    "nccl": 40,
    "streams": 20,
    "comfy": 85,
    "compiled": 75,
    "vae": 40,
    "memory": 55,
    "faults": 50,
    "timing": 30,
    "several": 120,  # ends at once where there is one card
}
"""Seconds that each may take."""
BY_SERVER = ("comfy", "vae", "faults")
"""Those that ask a server, and are the same lines on any device."""
