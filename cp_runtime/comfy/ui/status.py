"""The status of the workers and of the last run: a snapshot for routes, events and texts under nodes. Taking one waits for no lock,
no rank and no device."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...controller.journal import Failure, Journal
from ...controller.prompt_times import PromptTimes, cached_nodes, seconds_of
from ...controller.run_stats import CallRecord, Node, RunResult
from ...controller.workers import Workers
from ...pool.progress import SILENT
from ...pool.worker_pool import WorkerPool
from ...system.processes import host_bytes
from ...version import VERSION
from ...words import ENGLISH, Words, translations, words_in
from .hosts import HOSTS
from .runtime import CONTROLLER, nothing_to_share
from .single_device import SingleDeviceReason

LINGER = 1.0
"""Seconds that a state outlasts a command within a prompt. Between two commands the ranks are idle for a moment."""

MOST = 60
"""Characters of a text under a node: its two lines have no room for more. The panel has the rest."""

STATES = {"start": "starting", "load": "loading", "attach_network": "loading", "call": "computing"}
"""State by command. The others take no time: the ranks keep their state."""

NO_SPEED = {"state.failed": "failed", "obstacle.cancelled": "cancelled"}
"""Key of the reason for no speed, of "title", by the outcome of an unfinished prompt."""

UNFINISHED = {"execution_error": "state.failed", "execution_interrupted": "obstacle.cancelled"}
"""Outcome of an unfinished prompt, a key of its text, by the message in ComfyUI's history."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The workers and the last run at one moment; by default without workers. For the fields not named here see docs/failures.md.

    Args:
        result: of the last sampling run.
        measuring: the next run is compared with one device.
        unfinished: the last prompt with a node of this pack has failed or was cancelled: it has no speed.
        no_speed: key of the reason for no speed, of "title".
        node: the current or last one that uses the workers.
        waiting, compiling: ranks that have not reported on the command, and those of them that compile.
        comparing: a call is repeated on one device.
        last: the last call of what the ranks do now, or did last; of a sampling run, the one in its result.
        last_prompt: where its time went, see `PromptTimes.described`; None while one runs.
    """

    state: str = "off"
    starting: dict[str, Any] | None = None
    loading: dict[str, Any] | None = None
    world_size: int = 0
    backend: str | None = None
    peer_to_peer: bool | None = None
    fallback: str = ""
    models: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict[str, str]] = field(default_factory=dict)
    pace: float | None = None
    last_call: CallRecord | None = None
    last_vae_call: CallRecord | None = None
    last_upscale_call: CallRecord | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any]
    hosts: list[dict[str, Any]]
    alone: SingleDeviceReason | None
    last_error: Failure | None
    errors: list[Failure]
    result: RunResult | None
    measuring: bool
    unfinished: bool
    no_speed: str
    node: Node | None
    last_prompt: dict[str, Any] | None
    last: CallRecord | None = None
    waiting: list[int] = field(default_factory=list)
    compiling: list[int] = field(default_factory=list)
    comparing: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """The status as plain data. Anyone who reaches ComfyUI's port can read it: it holds no paths and no tracebacks."""
        inside = ("result", "measuring", "unfinished", "node", "last", "waiting", "comparing")
        result, call = self.result or RunResult(), self.last_call
        is_known = self.result is not None and not self.unfinished
        return {
            **{name: getattr(value, "described", value) for name, value in vars(self).items() if name not in inside},
            "version": VERSION,
            "activity": self.activity(words_in(ENGLISH)),
            "node": self.node and {"id": self.node.node_id, "type": self.node.kind},
            "compiling": bool(self.compiling),
            "speed": {**result.described, "measuring": self.measuring} if is_known or self.measuring else None,
            "last_call": call and {**call.described, "waiting_share": result.waiting_share},  # of the run, as in the report
            "translations": {text: translations(text) for text in (self.fallback, *self.weights.values()) if text},
            "errors": [error.described for error in self.errors],
            "last_prompt": self.last_prompt
            and {**self.last_prompt, "words": words_in(ENGLISH).prompt(self.last_prompt["sentence"])},
        }

    def activity(self, words: Words) -> str:
        """Return the current or last activity of the workers, or the reason for their absence, in words."""
        # Another node's activity does not concern this one.
        last = [] if self.last is None or self.last.node != self.node else self._facts(words, self.last)
        return self._doing(words) or " · ".join(last)

    def _doing(self, words: Words) -> str:
        """Return what takes time now, other than a call, or the reason for the absence of workers."""
        if not self.world_size:
            return "" if self.alone is None else self.alone.said(words)
        if self.starting is not None:
            last, stage = self.starting["last_took"], words.say(f"stage.{self.starting['stage']}")
            again = "starting" if last is None else "starting_again"
            return words.say(f"node.{again}", count=self.world_size, stage=stage, last=f"{last or 0:.0f}")
        if self.loading is not None:
            model, part = self.loading["model"], self.loading["part"]
            case = "loading" if part is None else "loading_part"
            return words.say(f"node.{case}", model=model, ranks=self._ranks(words, self.waiting), part=f"{100 * (part or 0):.0f}")
        if self.compiling:
            return words.say("node.compiling", ranks=self._ranks(words, self.compiling))
        if self.comparing:
            return words.say("node.measuring")
        return ""

    def text(self, words: Words, node: Node | None) -> str:
        """Return the text under a node, of at most `MOST` characters: its activity, or the times of its run; empty for another."""
        mine, result = node == self.node, self.result
        if mine and (doing := self._doing(words)):
            return fitting([doing])
        if result is not None and result.last is None and result.per_call and mine:  # on one device
            return fitting([words.speed(dict(result.parts, cases=[result.case])), _per_call(words, result.per_call)])
        records = [self.last if mine else None, result and self.world_size and result.last]
        return next((fitting(self._facts(words, record, brief=True)) for record in records if record and record.node == node), "")

    def _facts(self, words: Words, record: CallRecord, brief: bool = False) -> list[str]:
        """Put a call, and its run, into words. `brief`: its speed only where that is a figure, without how it came about."""
        outcome, result = record.reports[0].outcome, self.result
        ranks = f"{words.say('ranks', count=self.world_size)} ({words.mesh(outcome.degrees, outcome.at_work)})"
        if record.choice is not None and record.choice["ranks"] < self.world_size:
            ranks = words.choice(record.choice)  # otherwise the others would seem idle
        if result is None or record is not result.last:  # of pictures
            return [ranks, _per_call(words, record.seconds)]
        cases = [result.case] if brief else result.parts["cases"]
        speed = [] if brief and result.times is None else [words.speed(dict(result.parts, cases=cases))]
        return [*speed, _per_call(words, result.per_call or record.seconds), ranks]

    def _ranks(self, words: Words, some: list[int]) -> str:
        if len(some) in (0, self.world_size):
            return words.say("ranks", count=self.world_size)
        return words.say("node.rank", ranks=", ".join(map(str, some)))


def fitting(facts: list[str]) -> str:
    """Join those facts that have room in a node, the first ones first."""
    text = facts[0] if len(facts[0]) <= MOST else f"{facts[0][: MOST - 1]}…"
    for fact in facts[1:]:
        text = f"{text} · {fact}" if len(f"{text} · {fact}") <= MOST else text
    return text


def _per_call(words: Words, seconds: float) -> str:
    return words.say("per_call", time=f"{seconds:.3g} s")


def snapshot(server: Any) -> Status:
    """Return the status now. `server`: ComfyUI's `PromptServer`.

    A rank is "starting", "loading", "computing", "idle", "silent" (no sign of life, see SILENT), "gone" (its process has vanished,
    but no command has noticed yet), "failed" or "ended" (with the one that failed). Times are seconds, memory is bytes: `host` is
    resident now, `device` the peak of the last call.
    """
    workers, journal = CONTROLLER.workers, CONTROLLER.journal
    result, end = journal.result, NO_SPEED.get(ending(server, journal.own_prompt.prompt_id) or "")
    off = Status(
        settings=asdict(CONTROLLER.preferences.chosen),
        hosts=HOSTS.listed(workers.pool if workers else None),
        alone=nothing_to_share(),
        last_error=journal.last_error,
        errors=list(journal.errors),
        result=result,
        measuring=journal.measuring,
        unfinished=end is not None,
        no_speed=end or _no_speed(journal),
        node=journal.node,
        last_prompt=_last_prompt(server, journal.prompt),
    )
    if workers is None:
        return off
    pool, loading, waiting, sampling = workers.pool, workers.loading, workers.pool.waiting_for, workers.purpose == "sampling"
    work = _work(server, pool, off.node) if loading is None else "loading"
    # A rank that has reported is done, while others are not; at the start it waits for them.
    done = set(range(pool.world_size)).difference(waiting) if waiting and work != "starting" else ()
    # Only these ranks' calls of the run are news of them.
    record = result.last if result and result.last and result.last.pids == pool.pids else None
    last = record if sampling else workers.last_calls.get(workers.purpose)
    ranks = [_rank(workers, record, last, rank, "idle" if rank in done else work) for rank in range(len(pool.processes))]
    return replace(
        off,
        state=_state(pool, ranks, work),
        starting={"since": pool.since, "stage": pool.stage, "last_took": workers.last_start} if pool.command == "start" else None,
        # Rounded: a finer part would cause events too often.
        loading=loading and {"model": loading[0], "part": None if loading[1] is None else round(loading[1], 2)},
        world_size=pool.world_size,
        backend=pool.backend,
        peer_to_peer=pool.peer_to_peer,
        fallback="\n".join(filter(None, (pool.fallback.reason, pool.chosen))),
        models=workers.models.names,
        weights=workers.models.placements,
        memory=workers.models.memory,
        pace=(result.per_call or record.seconds) if result and record and work == "computing" and sampling else None,
        last_call=record,
        last_vae_call=workers.last_calls.get("vae"),
        last_upscale_call=workers.last_calls.get("upscale"),
        ranks=ranks,
        last=last if pool.alive else None,
        waiting=waiting,
        compiling=[rank for rank in waiting if pool.progress(rank).at.compiling],
        comparing=workers.comparing,
    )


def ending(server: Any, prompt_id: str, node_id: str | None = None) -> str | None:
    """Return how a prompt ended before its end, or before a node of it: a key of its text, "" if that was done, None if it runs."""
    entry = server.prompt_queue.history.get(prompt_id)
    if entry is None:
        return None
    for name, data in (entry["status"] or {"messages": []})["messages"]:
        if name in UNFINISHED and node_id not in data["executed"]:
            return UNFINISHED[name]
    return ""


def _no_speed(journal: Journal) -> str:
    """Return what became of the last run, where it has no speed: a key of its text, of "title"."""
    if journal.last_error is not None:
        return "failed"
    if journal.is_bypassed:
        return "bypassed"
    return "running" if journal.run.machine or journal.own_prompt.unfinished else "no_run"


def _last_prompt(server: Any, times: PromptTimes) -> dict[str, Any] | None:
    entry = server.prompt_queue.history.get(times.prompt_id)
    if entry is None:
        return None
    messages = (entry["status"] or {"messages": []})["messages"]
    times.end(seconds_of(messages))
    return times.described(cached_nodes(messages))


def _work(server: Any, pool: WorkerPool, node: Node | None) -> str:
    """Return the state of healthy ranks."""
    runs = node is not None and ending(server, node.prompt_id, node.node_id) is None
    recent = runs and time.monotonic() - pool.last_command_ended < LINGER
    return STATES.get(pool.command) or STATES.get(pool.last_command if recent else "", "idle")


def _state(pool: WorkerPool, ranks: list[dict[str, Any]], work: str) -> str:
    if not pool.alive:
        return "starting" if pool.command == "start" else "failed"
    # A rank that imports or loads may hold the GIL for longer than SILENT.
    lost = ("gone",) if pool.command and (pool.command != "call" or work == "loading") else ("gone", "silent")
    return "failed" if any(rank["state"] in lost for rank in ranks) else work


def _rank(workers: Workers, record: CallRecord | None, last: CallRecord | None, rank: int, state: str) -> dict[str, Any]:
    """Describe a rank. `record`: of the sampling run. `last`: as in `Status`."""
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
    memory = workers.last_call and workers.last_call.reports[rank].memory
    # The process id of a rank on another machine says nothing here.
    host = (memory.host if memory else 0) if pool.config.machines[rank] else host_bytes(pid)
    return {
        "rank": rank,
        "device": pool.config.devices[rank],
        "pid": pid,
        "state": state,
        "culprit": culprit,
        "idle": last is not None and last.reports[rank].outcome.idle,
        "process": kernel,
        "modules": progress.at.modules,
        "seconds_since_heartbeat": since,
        "memory": {"host": host, "device": memory.device if memory else 0},
        "tokens": record.reports[rank].outcome.tokens if record else {},
    }
