"""What the workers are doing, for the status route and the panel. Reads only: it waits for no lock, no rank and no device."""

from __future__ import annotations

import time
from typing import Any

from ...pool.board import SILENT, resident_bytes
from ...pool.stacks import process_state
from ...pool.worker_pool import WorkerPool
from ...version import VERSION
from .choosing import in_words
from .controller import CONTROLLER, Controller
from .journal import CallRecord, Node
from .report import axes
from .workers import Workers

LINGER = 1.0
"""Seconds. Between two commands of a prompt the ranks have nothing to do for a moment: a state lasts that much longer, within the
prompt."""

STATES = {"start": "starting", "load": "loading", "attach_network": "loading", "call": "computing"}
"""State by command; others take no time."""

UNFINISHED = {"execution_error": "failed", "execution_interrupted": "cancelled"}
"""How a prompt did not reach its end, by the message that ComfyUI keeps in its history."""


def status(server: Any, controller: Controller = CONTROLLER) -> dict[str, Any]:
    """State of the pool and of every rank, as plain data. `server` is ComfyUI's `PromptServer`.

    `state` is "off" (no workers: they start with the next prompt that needs them), "starting", "loading", "computing", "idle" or
    "failed" (started again on next use); `activity` says more in words. A rank is "starting", "loading", "computing", "idle",
    "silent" (no sign of life, see SILENT) or "gone". `backend` is the one in use, None until the ranks are ready; `peer_to_peer`,
    of NCCL only, whether the driver lets all GPUs reach each other's memory. `last_call` is None before the first one. Times are
    seconds, memory is bytes: `host` is resident now; `device` is the peak of the last call. `idle`: the last call left the rank
    out. `version` is the pack's. Anyone who reaches ComfyUI's port can read it: it holds no paths and no tracebacks.
    """
    workers, error = controller.workers, controller.journal.last_error
    failure = None if error is None else {"time": error.time, "rank": error.rank, "message": error.message}
    always = {"version": VERSION, "last_error": failure}
    if workers is None:
        return {
            "state": "off", "activity": "", "world_size": 0, "backend": None, "peer_to_peer": None, "models": [], "weights": {},
            "last_call": None, "ranks": [], **always
        }  # fmt: skip
    pool = workers.pool
    loading, waiting = workers.loading, pool.waiting_for  # read once: state and words are to agree
    work = _work(server, controller, pool) if loading is None else "loading"
    # One that has reported is done, while others are not.
    ranks = [_rank(controller, workers, r, "idle" if waiting and r not in waiting else work) for r in range(len(pool.processes))]
    return {
        "state": _state(pool, ranks, work),
        "activity": _activity(controller, workers, loading),
        "world_size": pool.world_size,
        "backend": pool.backend,
        "peer_to_peer": pool.peer_to_peer,
        "models": workers.models,
        "weights": workers.placements,
        "last_call": _last_call(controller, workers.last_call),
        "ranks": ranks,
        **always,
    }


def _activity(controller: Controller, workers: Workers, loading: tuple[str, float | None] | None) -> str:
    """What the workers do at the moment, or did last, in words."""
    pool = workers.pool
    doing, waiting = pool.doing, pool.waiting_for
    if doing == "start":
        return f"starting {_ranks(pool, waiting)}…"
    if loading is not None:
        model, loaded = loading
        return f"loading {model} on {_ranks(pool, waiting)}…" + ("" if loaded is None else f" {100 * loaded:.0f} %")
    if compiling := [rank for rank in waiting if pool.progress(rank).compiling]:
        return f"compiling blocks on {_ranks(pool, compiling)}…"
    record = workers.last_call
    if record is None or record.node != controller.node or not pool.alive:
        return ""  # what another node did says nothing about this one
    seconds = _per_call(controller, record) or record.seconds
    ranks = f"{pool.world_size} ranks ({axes(record.reports[0]['degrees'])})"
    if record.choice is not None and record.choice["ranks"] < pool.world_size:
        ranks = in_words(record.choice)  # else it looks as if the others did not work
    return f"{ranks}, {seconds:.3g} s per call"


def ending(server: Any, node: Node | None) -> str | None:
    """How the prompt of a node ended before the node did: "failed" or "cancelled"; empty where the node was done, None while it
    runs."""
    entry = None if node is None else server.prompt_queue.history.get(node.prompt_id)
    if node is None or entry is None:
        return None
    for name, data in (entry["status"] or {"messages": []})["messages"]:
        if name in UNFINISHED and node.node_id not in data["executed"]:
            return UNFINISHED[name]
    return ""


def _ranks(pool: WorkerPool, waiting: list[int]) -> str:
    if len(waiting) in (0, pool.world_size):
        return f"{pool.world_size} ranks"
    return "rank " + ", ".join(map(str, waiting))


def _last_call(controller: Controller, record: CallRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "degrees": record.reports[0]["degrees"],
        "choice": in_words(record.choice),
        "seconds": record.seconds,
        # Alike for both, so that they can be compared: with what the sampler does between two calls.
        "seconds_per_call": _per_call(controller, record),
        "seconds_per_call_on_one_device": controller.journal.on_one_device,
        "communication_share": record.communication_share,
    }


def _per_call(controller: Controller, record: CallRecord) -> float | None:
    """Seconds from one call of the ranks to the next; None where there were too few."""
    # A run on one device may have come since. It was measured after the last call of the ranks had ended.
    run = controller.journal.run
    ours = (run.per_call(record.ended) or 0) > 0
    return run.per_call() if ours else None


def _work(server: Any, controller: Controller, pool: WorkerPool) -> str:
    """The state of ranks that are well."""
    recent = controller.node is not None and ending(server, controller.node) is None and time.monotonic() - pool.did_until < LINGER
    return STATES.get(pool.doing or (pool.did if recent else ""), "idle")


def _state(pool: WorkerPool, ranks: list[dict[str, Any]], work: str) -> str:
    if not pool.alive:
        return "starting" if pool.doing == "start" else "failed"
    # A rank that imports or loads may hold the GIL for longer than SILENT.
    lost = ("gone",) if pool.doing and (pool.doing != "call" or work == "loading") else ("gone", "silent")
    if any(rank["state"] in lost for rank in ranks):
        return "failed"
    return work


def _rank(controller: Controller, workers: Workers, rank: int, state: str) -> dict[str, Any]:
    pool = workers.pool
    at, pid = pool.progress(rank), pool.pids[rank]
    since = time.monotonic() - at.beat if at.beat else None
    kernel = process_state(pid) if pid else "not forked yet"
    if kernel in ("gone", "zombie", "dead"):
        state = "gone"
    elif since is not None and since > SILENT:
        state = "silent"
    record, error = workers.last_call, controller.journal.last_error
    report = record.reports[rank] if record else None
    return {
        "rank": rank,
        "device": pool.config.devices[rank],
        "pid": pid,
        "state": state,
        "idle": bool(report and report["idle"]),
        "process": kernel,
        "modules": at.modules,
        "seconds_since_heartbeat": since,
        "memory": {"host": resident_bytes(pid), "device": report["memory"]["device"] if report else 0},
        "tokens": report["tokens"] if report else {},
        "models": workers.models if state in ("idle", "computing") else [],
        "last_error": error.message if error is not None and error.rank == rank else None,
    }
