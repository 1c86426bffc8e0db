"""Processes of this computer, on every system. For ranks and their owner only: psutil is a requirement of ComfyUI."""

from __future__ import annotations

import psutil


def process_state(pid: int) -> str:
    """Return what the kernel says a process does, such as "sleeping" or "stopped"; "gone" without such a process."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def host_bytes(pid: int) -> int:
    """Return the host memory of a process, in bytes; 0 without such a process."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
