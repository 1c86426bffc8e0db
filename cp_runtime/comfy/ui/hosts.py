"""Other computers, for the panel: those that it asked about, and those of the workers."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ...controller.journal import public_message
from ...errors import PoolError
from ...pool.config import check_host, split_device
from ...pool.hosts import UNREACHED, check
from ...pool.worker_pool import WorkerPool
from ...recent import Recent
from ...words import translations
from .runtime import CONTROLLER, device_inventory, worker_site

CHECKING, WORKING = "checking", "working"
REMEMBERED_HOSTS = 20  # hosts that are remembered


class Hosts:
    """What is known of other computers: each its `host`, `state` (CHECKING, WORKING or one of `pool.hosts`), the `reason` why it
    cannot work, with `translations`, and its `devices`, by the names that CP Config takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked: Recent[str, dict[str, Any]] = Recent(REMEMBERED_HOSTS)
        self._running: dict[str, Future[dict[str, Any]]] = {}

    def check(self, host: Any) -> Future[dict[str, Any]]:
        """Look whether a host can work for this computer, without a rank. Returns at once, in any thread; a request during a check
        joins it. Raises ConfigError: it is no name of a host."""
        check_host(host)
        with self._lock:
            if host not in self._running:
                future: Future[dict[str, Any]] = Future()
                future.set_running_or_notify_cancel()
                # A daemon thread: Python joins all others at exit.
                threading.Thread(target=self._run, args=(host, future), name=f"check of {host}", daemon=True).start()
                self._running[host] = future
                self._note(host, CHECKING, "", [])
            return self._running[host]

    def listed(self, pool: WorkerPool | None) -> list[dict[str, Any]]:
        """Return all hosts that were checked, and those of a pool, if it works."""
        found = dict(self._checked)
        if pool is None or not pool.alive:
            return list(found.values())
        ranks = list(zip(pool.config.devices, pool.device_names, strict=True))
        for host in pool.hosts:
            own = [{"name": name, "title": title, "memory": 0} for name, title in ranks if split_device(name)[0] == host]
            known = found.get(host, {}).get("devices")
            found[host] = _told(host, WORKING, "", known or own)
        return list(found.values())

    def _run(self, host: str, future: Future[dict[str, Any]]) -> None:
        try:
            state, reason, devices = check(host, worker_site(), device_inventory().type)
            public = public_message(PoolError(reason))
        except Exception as error:  # noqa: BLE001  (whoever waits gets an answer)
            state, public, devices = UNREACHED, public_message(error), []
        with self._lock:
            del self._running[host]
            found = self._note(host, state, public, devices)
        future.set_result(found)

    def _note(self, host: str, state: str, reason: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
        found = self._checked[host] = _told(host, state, reason, devices)
        CONTROLLER.journal.changed.set()
        return found


def _told(host: str, state: str, reason: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"host": host, "state": state, "reason": reason, "translations": translations(reason), "devices": devices}


HOSTS = Hosts()
