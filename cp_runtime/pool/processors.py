"""Processors for what the host does beside devices: those near a rank's device, and few threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..system import system
from ..system.environment import library_setting

DEVICES = Path("/sys/bus/pci/devices")
HOST_THREADS = 4  # the host only copies then, and copies by many threads wait for each other


def bind_near(device: torch.device, ranks: int) -> None:
    """Keep this thread, and those that it starts, to the cores near a device, and operations to a few threads unless the user says
    how many (`OMP_NUM_THREADS`). `ranks`: on this machine, beside ComfyUI.

    Not by the environment of ranks: it would differ with their number, and then what was imported ahead would be of no use.
    """
    cores = system.cores()
    if library_setting("OMP_NUM_THREADS") is None:
        torch.set_num_threads(max(1, min(HOST_THREADS, len(cores) // (ranks + 1))))
    if near := _cores_near(device) & cores:
        with contextlib.suppress(OSError):  # a container may forbid it
            system.set_affinity(near)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have this thread's operations run on it alone, while active. A call's tensors are so small that it takes longer to wake
    sixteen threads than to copy them: 11 ms of a call beside an H200, 3 ms without."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _cores_near(device: torch.device) -> set[int]:
    """Return the cores of the node of memory that a GPU is connected to; none where the system does not say."""
    if device.type != "cuda":
        return set()
    known: Any = torch.cuda.get_device_properties(device)
    # An older torch does not know the address, and containers may hide the folder.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        address = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
        ranges = (part.split("-") for part in (DEVICES / address / "local_cpulist").read_text().strip().split(","))
        return {core for bounds in ranges for core in range(int(bounds[0]), int(bounds[-1]) + 1)}
    return set()
