"""What a pool needs of other machines that have ranks of it. `machines.host` provides it; without it all ranks are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .config import WorkerSite
from .forking import RankProcess


class OtherMachine(Protocol):
    """A machine that starts ranks, as a `forking.ForkServer` does here."""

    def start(self, spec: dict[str, Any], fds: dict[str, int], site: WorkerSite) -> RankProcess:
        """Ask for a rank and return at once. It reads commands and writes reports as if it had inherited the descriptors."""


class OtherMachines(Protocol):
    """The machines that have joined."""

    @property
    def here(self) -> Mapping[str, OtherMachine]:
        """Those that are there now, by name."""

    @property
    def interface(self) -> dict[str, str]:
        """Variables by which ranks of this machine reach those of the others."""

    @property
    def store(self) -> tuple[str, int]:
        """Address and port of the store in which ranks meet."""
