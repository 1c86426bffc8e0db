"""Whether the GPUs of a pool reach each other's memory: without that, what ranks send each other goes through the host's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch


def without_peer_access(devices: Sequence[str]) -> list[str]:
    """Pairs of CUDA devices, as torch names them, of which the driver does not let the first reach the memory of the second."""
    reaches = torch.cuda.can_device_access_peer
    return [f"{one} to {other}" for one, other in permutations(devices, 2) if not reaches(one, other)]
