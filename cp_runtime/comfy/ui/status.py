"""Status of the workers, for the status route and the panel. Only reads: it waits for no lock, no rank and no device."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ...controller.journal import Failure, Journal
from ...controller.run_stats import NOT_MEASURED, CallRecord, Node
from ...controller.workers import Workers
from ...pool.progress import SILENT
from ...pool.worker_pool import WorkerPool
from ...system.processes import host_bytes
from ...version import VERSION
from ...words import ENGLISH, Words, words_in
from .hosts import HOSTS
from .runtime import CONTROLLER, nothing_to_share

LINGER = 1.0
"""Seconds that a state outlasts a command within a prompt. Between two commands the ranks are idle for a moment."""

STATES = {"start": "starting", "load": "loading", "attach_network": "loading", "call": "computing"}
"""State by command. The others take no time: the ranks keep their state."""

UNFINISHED = {"execution_error": "state.failed", "execution_interrupted": "obstacle.cancelled"}
"""Outcome of an unfinished prompt, a key of its text, by the message in ComfyUI's history."""


def status(server: Any) -> dict[str, Any]:
    """Return the state of the pool and of every rank as plain data: see docs/failures.md. `server`: ComfyUI's `PromptServer`.

    A rank is "starting", "loading", "computing", "idle", "silent" (no sign of life, see SILENT), "gone" (its process has vanished,
    but no command has noticed yet), "failed" or "ended" (with the one that failed). Times are seconds, memory is bytes: `host` is
    resident now, `device` the peak of the last call. Anyone who reaches ComfyUI's port can read it: it holds no paths and no
    tracebacks.
    """
    workers, journal, alone = CONTROLLER.workers, CONTROLLER.journal, nothing_to_share()
    speed = _speed(journal)  # read once, so that all figures of a status are of the same moment
    found: dict[str, Any] = {
        "state": "off", "activity": activity(words_in(ENGLISH)), "starting": None, "loading": None, "compiling": False,
        "world_size": 0, "backend": None, "peer_to_peer": None, "fallback": "", "models": [], "weights": {}, "memory": {},
        "pace": None, "last_call": None, "last_vae_call": None, "ranks": [], "version": VERSION, "speed": speed,
        "last_error": _failure(journal.last_error), "errors": [_failure(each) for each in list(journal.errors)],
        "alone": alone and alone.described,
        "settings": asdict(CONTROLLER.preferences.chosen),
        "hosts": HOSTS.listed(workers.pool if workers else None),
    }  # fmt: skip
    if workers is None:
        return found
    pool, last = workers.pool, journal.run.last
    loading, waiting = workers.loading, pool.waiting_for  # read once, so that state and words agree
    # Of the last sampling run, if these ranks computed it.
    record = last if last is not None and last.pids == pool.pids else None
    vae = workers.last_vae_call
    work = _work(server, pool) if loading is None else "loading"
    # A rank that has reported is done, while others are not; at the start it waits for them.
    done = set(range(pool.world_size)).difference(waiting) if waiting and work != "starting" else ()
    ranks = [_rank(workers, record, rank, "idle" if rank in done else work) for rank in range(len(pool.processes))]
    sampling = work == "computing" and workers.sampling
    return found | {
        "state": _state(pool, ranks, work),
        "activity": _activity(words_in(ENGLISH), workers, loading),
        "starting": None
        if pool.command != "start"
        else {"since": pool.since, "stage": pool.stage, "last_took": workers.last_start},
        # Rounded: a finer part would cause events too often.
        "loading": loading and {"model": loading[0], "part": None if loading[1] is None else round(loading[1], 2)},
        "compiling": bool(_compiling(pool)),
        "world_size": pool.world_size,
        "backend": pool.backend,
        "peer_to_peer": pool.peer_to_peer,
        "fallback": "\n".join(filter(None, (pool.fallback.reason, pool.chosen))),
        "models": workers.models.names,
        "weights": workers.models.placements,
        "memory": workers.models.memory,
        "pace": (speed and speed["seconds_per_call"]) or last.seconds if sampling and last else None,
        "last_call": None if record is None else _described(record),
        "last_vae_call": None if vae is None else _described(vae),
        "ranks": ranks,
    }


def activity(words: Words) -> str:
    """Return the current or last activity of the workers, or why there are none, in words."""
    if (workers := CONTROLLER.workers) is None:
        alone = nothing_to_share()
        return "" if alone is None else alone.said(words)
    return _activity(words, workers, workers.loading)


def _activity(words: Words, workers: Workers, loading: tuple[str, float | None] | None) -> str:
    pool = workers.pool
    waiting = pool.waiting_for
    if pool.command == "start":
        again = "starting" if workers.last_start is None else "starting_again"
        stage = words.say(f"stage.{pool.stage}")
        return words.say(f"node.{again}", count=pool.world_size, stage=stage, last=f"{workers.last_start or 0:.0f}")
    if loading is not None:
        model, loaded = loading
        case = "loading" if loaded is None else "loading_part"
        return words.say(f"node.{case}", model=model, ranks=_ranks(words, pool, waiting), part=f"{100 * (loaded or 0):.0f}")
    if compiling := _compiling(pool):
        return words.say("node.compiling", ranks=_ranks(words, pool, compiling))
    if workers.comparing:
        return words.say("node.measuring")
    record = workers.last_call
    if record is None or record.node != CONTROLLER.journal.node or not pool.alive:
        return ""  # another node's activity does not concern this one
    return _in_words(words, record, pool.world_size)


def node_text(words: Words, node: Node | None) -> str:
    """Return the times of the last sampling run, in words, if it was this node's; else an empty text."""
    workers, journal = CONTROLLER.workers, CONTROLLER.journal
    record, speed = journal.run.last, journal.speed
    if record is None and speed is not None and speed.per_call and node == journal.node:  # on one device
        return f"{words.speed(speed.parts)} · {_per_call(words, speed.per_call)}"
    if workers is None or record is None or record.node != node:
        return ""
    return _in_words(words, record, workers.pool.world_size)


def _in_words(words: Words, record: CallRecord, world_size: int) -> str:
    outcome, speed = record.reports[0].outcome, CONTROLLER.journal.speed
    ranks = f"{words.say('ranks', count=world_size)} ({words.mesh(outcome.degrees, outcome.at_work)})"
    if record.choice is not None and record.choice["ranks"] < world_size:
        ranks = words.choice(record.choice)  # otherwise the others would seem idle
    if speed is None or record is not CONTROLLER.journal.run.last:  # of a VAE
        return f"{ranks}, {_per_call(words, record.seconds)}"
    return f"{words.speed(speed.parts)} · {_per_call(words, speed.per_call or record.seconds)} · {ranks}"


def _per_call(words: Words, seconds: float) -> str:
    return words.say("per_call", time=f"{seconds:.3g} s")


def _compiling(pool: WorkerPool) -> list[int]:
    return [rank for rank in pool.waiting_for if pool.progress(rank).at.compiling]


def ending(server: Any, node: Node | None) -> str | None:
    """Return how a node's prompt ended before the node: a key of its text, "" if the node was done, None if it runs."""
    entry = None if node is None else server.prompt_queue.history.get(node.prompt_id)
    if node is None or entry is None:
        return None
    for name, data in (entry["status"] or {"messages": []})["messages"]:
        if name in UNFINISHED and node.node_id not in data["executed"]:
            return UNFINISHED[name]
    return ""


def _speed(journal: Journal) -> dict[str, Any] | None:
    speed = journal.speed
    if speed is None and not journal.measuring:
        return None
    parts = speed.parts if speed else {"cases": [NOT_MEASURED], "unit": "device", "obstacle": ""}
    return {
        "times": speed and speed.times,
        # Alike for both, so that they can be compared: with the sampler's time between two calls.
        "seconds_per_call": speed and speed.per_call,
        "seconds_per_call_on_one_device": speed and speed.on_one_device,
        "difference_from_one_device": journal.run.difference,
        "measuring": journal.measuring,
        "words": words_in(ENGLISH).speed(parts),
        "parts": parts,  # for texts in other languages
    }


def _failure(error: Failure | None) -> dict[str, Any] | None:
    if error is None:
        return None
    node = None if error.node is None else {"id": error.node.node_id, "type": error.node.kind}
    return {"time": error.time, "rank": error.rank, "device": error.device, "message": error.message, "node": node}


def _ranks(words: Words, pool: WorkerPool, waiting: list[int]) -> str:
    if len(waiting) in (0, pool.world_size):
        return words.say("ranks", count=pool.world_size)
    return words.say("node.rank", ranks=", ".join(map(str, waiting)))


def _described(record: CallRecord) -> dict[str, Any]:
    run = CONTROLLER.journal.run
    return {
        "degrees": record.reports[0].outcome.degrees,
        "at_work": sum(not report.outcome.idle for report in record.reports),
        "choice": words_in(ENGLISH).choice(record.choice),
        "seconds": record.seconds,
        # Of the run that the call belongs to, as the report has it; a call of a VAE belongs to none.
        "waiting_share": run.waiting_share if record is run.last else record.waiting_share,
    }


def _work(server: Any, pool: WorkerPool) -> str:
    """Return the state of healthy ranks."""
    node = CONTROLLER.journal.node
    recent = node is not None and ending(server, node) is None and time.monotonic() - pool.last_command_ended < LINGER
    return STATES.get(pool.command) or STATES.get(pool.last_command if recent else "", "idle")


def _state(pool: WorkerPool, ranks: list[dict[str, Any]], work: str) -> str:
    if not pool.alive:
        return "starting" if pool.command == "start" else "failed"
    # A rank that imports or loads may hold the GIL for longer than SILENT.
    lost = ("gone",) if pool.command and (pool.command != "call" or work == "loading") else ("gone", "silent")
    if any(rank["state"] in lost for rank in ranks):
        return "failed"
    return work


def _rank(workers: Workers, record: CallRecord | None, rank: int, state: str) -> dict[str, Any]:
    pool, failure = workers.pool, workers.failure
    progress, pid = pool.progress(rank), pool.pids[rank]
    since = time.monotonic() - progress.beat if progress.beat else None
    kernel = pool.processes[rank].state if pid else "not started yet"
    culprit = failure is not None and failure.rank == rank
    if kernel in ("gone", "zombie", "dead"):
        state = "gone"
        if not pool.alive and pool.command != "start":  # it was noticed, and the others ended
            state = "failed" if culprit else "ended"
    elif since is not None and since > SILENT:
        state = "silent"
    # A rank's part of a sequence is of the sampling run; its memory, and whether it idled, of the last call of its kind.
    last = workers.last_call
    host = host_bytes(pid)
    if pool.config.machines[rank]:  # its process id is another machine's
        host = last.reports[rank].memory.host if last else 0
    same = last is not None and (last is not workers.last_vae_call) == workers.sampling
    return {
        "rank": rank,
        "device": pool.config.devices[rank],
        "pid": pid,
        "state": state,
        "culprit": culprit,
        "idle": bool(last and same and last.reports[rank].outcome.idle),
        "process": kernel,
        "modules": progress.at.modules,
        "seconds_since_heartbeat": since,
        "memory": {"host": host, "device": last.reports[rank].memory.device if last else 0},
        "tokens": record.reports[rank].outcome.tokens if record else {},
        "models": workers.models.names if state in ("idle", "computing") else [],
        "last_error": failure.message if failure is not None and culprit else None,
    }
