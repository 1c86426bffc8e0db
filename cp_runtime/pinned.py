"""Host memory that a device copies from and to while the host goes on."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from .system import system
from .system.native import address_of

PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class PinnableMemory(mmap.mmap):
    """Memory that CUDA may pin while it is referenced. `error`: CUDA's of that; None = it was not asked."""

    error: int | None = None

    def pin(self) -> int:
        """Pin it, once; return CUDA's error, 0 = none."""
        if self.error is None:
            self._address, self._device = address_of(self), torch.cuda.current_device()
            self.error = int(torch.cuda.cudart().cudaHostRegister(self._address, len(self), PORTABLE))
            if self.error:
                with contextlib.suppress(RuntimeError):  # CUDA keeps its last error, which the next kernel raises
                    torch.zeros(1, device="cuda")
        return self.error

    def __del__(self) -> None:
        if self.error == 0:
            torch.cuda.synchronize(self._device)  # a copy from here may be in flight; a thread that collects has another device
            torch.cuda.cudart().cudaHostUnregister(self._address)


def pinned_zeros(nbytes: int, device: torch.device) -> Tensor:
    """Return zero bytes in pinned host memory, released with the last tensor on them. Raises RuntimeError if CUDA does not pin that
    much.

    torch never frees pinned memory before the process ends, and pins blocks of a power of two bytes: 256 MB for 141.
    """
    if device.type != "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    memory = PinnableMemory(-1, nbytes, **system.PRIVATE)
    if code := memory.pin():
        raise RuntimeError(
            f"CUDA error {code}: {nbytes / 1e6:.0f} MB of host memory cannot be pinned. Raise the limit of locked memory "
            "(ulimit -l), or set weights to sharded in CP Config."
        )
    return torch.frombuffer(memory, dtype=torch.uint8)
