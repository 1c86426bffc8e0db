"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """What the kernel says a process does, such as "sleeping" or "stopped"; "gone" where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:")), "unknown")
