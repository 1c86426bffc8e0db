"""What the workers are doing, for `GET /context_parallel/status`. Reads only: it waits for no lock, no rank and no device."""

from __future__ import annotations

import time
from typing import Any

from ..pool.board import SILENT, resident_bytes
from ..pool.controller import WorkerPool
from ..pool.stacks import process_state
from .session import SESSION, Session


def status(session: Session = SESSION) -> dict[str, Any]:
    """State of the pool and of every rank, as plain data.

    `state` is "off" (no workers: they start with the next prompt that needs them), "starting", "idle", "busy" or "failed" (started
    again on next use). A rank is "starting", "idle", "busy", "silent" (no sign of life, see SILENT) or "gone".
    Times are seconds, memory is bytes: `host` is resident now; `device` is the peak of the last call.
    """
    pool, error = session.pool, session.last_error
    failure = None if error is None else {"time": error.time, "rank": error.rank, "message": error.message}
    if pool is None:
        return {"state": "off", "world_size": 0, "backend": None, "models": [], "ranks": [], "last_error": failure}
    ranks = [_rank(session, pool, rank) for rank in range(len(pool.processes))]
    return {
        "state": _state(pool, ranks),
        "world_size": pool.world_size,
        "backend": pool.config.backend,
        "models": session.models,
        "ranks": ranks,
        "last_error": failure,
    }


def _state(pool: WorkerPool, ranks: list[dict[str, Any]]) -> str:
    if not pool.alive:
        return "starting" if pool.starting else "failed"
    if any(rank["state"] in ("gone", "silent") for rank in ranks):
        return "failed"
    return "busy" if any(rank["state"] == "busy" for rank in ranks) else "idle"


def _rank(session: Session, pool: WorkerPool, rank: int) -> dict[str, Any]:
    at, pid = pool.progress(rank), pool.pids[rank]
    since = time.monotonic() - at.beat if at.beat else None
    kernel = process_state(pid)
    if kernel in ("gone", "zombie", "dead"):
        state = "gone"
    elif since is not None and since > SILENT:
        state = "silent"
    elif pool.starting:
        state = "starting"
    else:
        state = "busy" if at.command else "idle"
    records, error = session.records, session.last_error
    reports = records[-1].reports if records else []
    return {
        "rank": rank,
        "device": pool.config.devices[rank],
        "pid": pid,
        "state": state,
        "process": kernel,
        "modules": at.modules,
        "seconds_since_heartbeat": since,
        "memory": {"host": resident_bytes(pid), "device": reports[rank]["memory"]["device"] if rank < len(reports) else 0},
        "models": session.models if state in ("idle", "busy") else [],
        "last_error": error.message if error is not None and error.rank == rank else None,
    }
