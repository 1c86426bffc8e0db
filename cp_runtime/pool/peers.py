"""How the ranks of a pool reach each other: peer-to-peer access of their GPUs, and the fallbacks without it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

import torch
import torch.distributed as dist

from ..engine.measuring import exchange_seconds
from ..engine.ranks.collectives import RankGroup
from ..system.environment import library_setting
from .config import RuntimeConfig

log = logging.getLogger("context_parallel")

P2P_DISABLE: Final = "NCCL_P2P_DISABLE"
SHM = "/dev/shm"
SHM_PER_RANK = 128 << 20  # bytes: a connection takes 10 MB per channel and direction, and a rank has some in each of its groups
MIN_SPEEDUP = 1.25  # of shared memory over NCCL, to replace it: ranks that have left NCCL cannot return without a restart
PROBE = 1 << 18  # numbers that each rank sends to each other rank


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How ranks communicate."""

    backend: str  # of torch.distributed
    peer_to_peer: bool = True  # whether NCCL may let GPUs reach each other's memory

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a rank connect this way."""
        return {} if self.peer_to_peer else {P2P_DISABLE: "1"}

    def __str__(self) -> str:
        return self.backend if self.peer_to_peer else f"{self.backend} with {P2P_DISABLE}=1"


def connections(config: RuntimeConfig) -> list[Connection]:
    """Return the connections to try, in order: the devices' own library, NCCL through the host's memory, and gloo, unless another
    was asked for by name."""
    if not config.native:
        return [Connection(backend="gloo")]
    ways = [Connection(backend=config.native)]
    if config.native == "nccl":
        ways.append(Connection(backend="nccl", peer_to_peer=False))
        if is_p2p_disabled():
            del ways[0]
    return [*ways, Connection(backend="gloo")] if config.backend == "auto" else ways


def is_p2p_disabled() -> bool:
    """Return whether the environment tells NCCL not to let GPUs reach each other's memory."""
    return library_setting(P2P_DISABLE) not in (None, "", "0")


class BackendFallback:
    """The ways to connect the ranks of a config, without those that have failed.

    Attributes:
        reason: why the first way was given up; empty = it was not.
        may_compare: whether ranks may compare NCCL with shared memory, and go on by that; not after it failed.
        comparing: they do.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._ranks, self._remaining, self.reason = config.world_size, connections(config), ""
        self.may_compare, self.comparing = config.backend == "auto", False

    @property
    def current(self) -> Connection:
        """The way to take."""
        return self._remaining[0]

    def next(self, why: str) -> bool:
        """Drop the current way, which failed, and go on to the next; False where there is none."""
        if self.comparing:
            self.comparing = self.may_compare = False
            log.warning("ranks did not exchange through shared memory (%s); they go on over %s", why, self.current)
            return True
        if len(self._remaining) == 1:
            return False
        self.reason = f"ranks did not connect over {self._remaining.pop(0)} ({why})"
        log.warning("%s; trying %s. %s", self.reason, self.current, shm_advice(self._ranks))
        return True


_fallbacks: dict[tuple[Any, ...], BackendFallback] = {}


def fallback_of(config: RuntimeConfig) -> BackendFallback:
    """Return the ways to connect ranks on these devices. What has failed once in this process is not tried again."""
    return _fallbacks.setdefault((config.devices, *connections(config)), BackendFallback(config))


def forget_fallbacks() -> None:
    """Try everything again: the user starts again, perhaps after a repair."""
    _fallbacks.clear()


def without_peer_access(devices: Sequence[str]) -> list[str]:
    """Return the pairs of CUDA devices where the driver does not let the first reach the memory of the second."""
    reaches = torch.cuda.can_device_access_peer
    return [f"{one} to {other}" for one, other in permutations(devices, 2) if not reaches(one, other)]


def check_peers(devices: Sequence[str], way: Connection) -> bool:
    """Return whether NCCL lets all GPUs reach each other's memory. Where it does not, warn of that, and of a /dev/shm that is too
    small."""
    pairs = without_peer_access(devices)
    if way.peer_to_peer and not pairs:
        return True
    which = f"from {', '.join(pairs)}" if way.peer_to_peer else f"with {P2P_DISABLE}=1"
    advice = shm_advice(len(devices))
    log.warning("no peer-to-peer transfers %s: what ranks send goes through host memory, slowly. %s", which, advice)
    return False


def shm_advice(ranks: int) -> str:
    """Return advice on /dev/shm, through which NCCL sends what cannot go from one GPU to the other; empty where it has room enough.

    See "Shared memory" in the chapter on troubleshooting of NCCL's user guide. Docker gives a container 64 MB.
    """
    try:
        found = os.statvfs(SHM)
        free = found.f_bavail * found.f_frsize
    except OSError:
        free = 0
    needed = ranks * SHM_PER_RANK
    if free >= needed:
        return ""
    return (
        f"{SHM} has {free / 2**20:.0f} MB free, of which NCCL may need {needed / 2**20:.0f}: start the container with "
        "--shm-size=1g or --ipc=host, or enlarge it."
    )


def compare(native: RankGroup, device: torch.device) -> float:
    """Return the speed of an exchange through shared memory, times that over a group of all ranks; 0 where there is none. Raises
    DistBackendError: it failed."""
    group = dist.new_group(backend="gloo")
    try:
        other = RankGroup(group)
        shared = math.inf
        if other.shared is not None:
            probe(other, device)
            shared = exchange_seconds(other, device)
        return exchange_seconds(native, device) / shared  # a collective: behind it no rank uses the other group any more
    except (OSError, RuntimeError) as error:
        raise dist.DistBackendError(f"messages through shared memory: {error}") from error
    finally:
        dist.destroy_process_group(group)


def probe(group: RankGroup, device: torch.device) -> None:
    """Send something from every rank to every other one, and check what arrives: where an IOMMU breaks peer-to-peer transfers, they
    hang or bring other numbers. Raises DistBackendError: the numbers are wrong."""
    numbers, counts = torch.arange(PROBE, dtype=torch.int32, device=device), [PROBE] * group.size
    received = numbers.new_zeros(PROBE * group.size)
    group.all_to_all((numbers + group.rank).repeat(group.size), counts, received, counts, "probe").wait()
    if not torch.equal(received, torch.cat([numbers + rank for rank in range(group.size)])):
        raise dist.DistBackendError("what ranks sent each other did not arrive as it was sent")
