"""Host memory that copies to a device can overlap, with no more bytes than asked for.

torch keeps what it pins, in blocks of a power of two bytes: 256 MB for 141, until the process ends.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class _Memory(mmap.mmap):
    """Memory that CUDA knows for as long as something refers to it, from `address` on."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.synchronize()  # a copy from here may be on its way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_zeros(nbytes: int, device: torch.device) -> Tensor:
    """Zero bytes in the host's memory, pinned for a device, which are given back with the last tensor on them.

    Raises:
        RuntimeError: CUDA does not pin that much.
    """
    if device.type != "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    memory = _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    run = torch.frombuffer(memory, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(run.data_ptr(), nbytes, PORTABLE))
    if code:
        raise RuntimeError(
            f"CUDA error {code}: {nbytes / 1e6:.0f} MB of host memory cannot be pinned. Raise the limit of locked memory "
            "(ulimit -l), or set weights to sharded in CP Config."
        )
    memory.address = run.data_ptr()
    return run
