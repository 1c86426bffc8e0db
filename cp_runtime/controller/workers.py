"""A pool of ranks and its calls. They are replaced together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from ..engine.measuring import device_driver
from ..errors import RankOutOfMemory
from ..pool.config import RuntimeConfig, WorkerSite
from ..pool.messages import Call, CallReport, Method
from ..pool.settings import OFFLOADED, SHARDED, STAGED
from ..pool.worker_pool import WorkerPool
from ..timing.choice import Chooser, Ranks
from ..timing.times import Times, digest
from .calls import ModelCall, ModelState, Pace, Purpose
from .journal import Failure
from .models import Models
from .placement import Shortages
from .run_stats import CallRecord, Node, RunStats

log = logging.getLogger("context_parallel")


class Workers:
    """The ranks of one pool. One caller at a time; any thread may read the attributes.

    Args:
        on_change: called when the status has changed.
        shortages: out-of-memory events on ranks, in this pool or an earlier one.
        times: of calls and starts.

    Attributes:
        models: on the ranks.
        last_call: of any model; None before the first one.
        last_calls: by purpose.
        purpose: of the current call, or the last one.
        failure: error of the last use of the ranks; None = it succeeded.
        comparing: a call is repeated on one device.
        pace: of the calls.
        dropped: numbers of tensors, noted by patches, that nobody needs any more.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        site: WorkerSite,
        on_change: Callable[[], None],
        shortages: Shortages,
        times: Times,
    ) -> None:
        self.pool = WorkerPool(config, site)
        self.models = Models(self.pool, shortages, on_change)
        self.last_call: CallRecord | None = None
        self.last_calls: dict[Purpose, CallRecord] = {}
        self.purpose: Purpose = "sampling"
        self.failure: Failure | None = None
        self.comparing = False
        self._times = times
        self._shortages = shortages
        self._logged_uncompiled: set[str] = set()  # kinds of uncompiled blocks; the log has named them
        self.pace = Pace()
        self.dropped: list[int] = []

    def start(self, cancelled: Callable[[], bool] | None) -> None:
        pool = self.pool
        pool.start(cancelled)
        machine = *pool.device_names, pool.backend, device_driver(), pool.peer_to_peer, pool.shares, *pool.config.machines
        self._chooser = Chooser(self._times, machine, f"{pool.device_names[0]}, {device_driver()}", len(pool.config.local))
        self._times.add("start", self._start_name, pool.seconds["start"])
        self._times.save()

    @property
    def _start_name(self) -> str:
        return digest(self.pool.config.devices)

    @property
    def last_start(self) -> float | None:
        """Seconds of the last start on these devices, in this process or an earlier one; None = there was none."""
        return next(reversed(self._times.of("start", self._start_name)), None)

    @property
    def loading(self) -> tuple[str, float | None] | None:
        """Name and `loaded` of the model of the current load; None without a load."""
        loaded = self.loaded
        return (self.models.name, loaded) if self.pool.command == "load" or loaded is not None else None

    @property
    def loaded(self) -> float | None:
        """Fraction of a model's weights on the slowest rank's device; None without a load."""
        if self.pool.command != "call":
            return None
        progress = [self.pool.progress(rank).at.loaded for rank in range(len(self.pool.processes))]
        return min((each / 1000 for each in progress if each is not None), default=None)

    @property
    def modules(self) -> int:
        """Planned modules that all ranks have entered in the current call; 0 = no call."""
        return min((self.pool.progress(rank).at.modules for rank in range(len(self.pool.processes))), default=0)

    @property
    def room(self) -> int | None:
        """Bytes that a call can take on the device of every rank, after the last call; None before it and where ranks are CPUs."""
        last = self.last_call
        reports = [] if last is None else last.reports[: last.most or None]
        return self.models.common_room([report.outcome.room for report in reports]) if reports else None

    def serves(self, config: RuntimeConfig) -> bool:
        return self.pool.alive and self._pool_key(self.pool.config) == self._pool_key(config)

    def _pool_key(self, config: RuntimeConfig) -> tuple[Any, ...]:
        # What ranks were started with. The last is in their collectives' timeout, which torch fixes when a group is made.
        return config.devices, config.backend, config.shares, max(config.step_timeout, self.pool.load_timeout)

    def call(
        self,
        config: RuntimeConfig,
        target: ModelState,
        call: ModelCall,
        node: Node | None,
        run: RunStats,
        cancelled: Callable[[], bool],
    ) -> tuple[Any, CallRecord]:
        """Run a call of the model `target`, which must be loaded. Return its output and record. `run`: its sampling run, if any."""
        self.purpose, placement = call.purpose, self.models.resident[target.key].choice.placement
        if not call.sampling or placement == STAGED:
            out, record = self._run(config, target.key, call, call.kind(target.kind), self.pool.world_size, cancelled)
        else:
            out, record = self._timed(config, target, call, run, cancelled)
        if config.weights == "auto" and placement in (SHARDED, OFFLOADED) and self._link_is_slow(record):
            self.models.slow.add(target.key)
        record = replace(record, node=node, controlnets=len(call.controlnets), controlnets_here=call.controlnets_here)
        if call.unlisted is not None:
            record = replace(record, on_all_tokens=call.unlisted.on_all_tokens, on_whole_batch=call.unlisted.on_whole_batch)
        self.last_call = self.last_calls[call.purpose] = record
        return out, record

    def _timed(
        self, config: RuntimeConfig, target: ModelState, call: ModelCall, run: RunStats, cancelled: Callable[[], bool]
    ) -> tuple[Any, CallRecord]:
        """Run a call on the number of ranks chosen as fastest, and record its times."""
        ranks, kind, chooser = self._ranks(config, target.key), run.now or call.kind(target.kind), self._chooser
        failed, expected = self._shortages.of(config.devices, kind), target.demand.call
        count, choice = ranks.most, None
        with _log_errors():
            if config.chooses_ranks and call.unlisted is None:  # such patches may note something for the next call
                if run.pinned and run.pinned not in failed:
                    count = run.pinned
                else:
                    count = chooser.choose(kind, ranks, lambda n: n not in failed and self._fits(ranks.largest_part(n) * expected))
        try:
            out, record = self._run(config, target.key, call, kind, count, cancelled)
        except RankOutOfMemory:
            if count < ranks.size:
                self._shortages.note(config.devices, kind, count)
            raise
        # One device in a format of its own rounds differently: a picture is of one of both.
        run.pinned = count if self.models.resident[target.key].casts else 0
        with _log_errors():
            run.one_rank = chooser.who(ranks, 1)
            record = replace(record, limit=sum(ranks.shares[:count]) / ranks.shares[0] if ranks.shares else 0.0)
            self._add(kind, chooser.who(ranks, count), record, run)
            chooser.note(kind, ranks, count)
            choice = chooser.described(kind, ranks, count) if config.chooses_ranks else None
        return out, replace(record, choice=choice)

    def _ranks(self, config: RuntimeConfig, key: str) -> Ranks:
        size, most = self.pool.world_size, self.models.resident[key].choice.most
        return Ranks(size, most or size, self.pool.shares, config.sequence, config.batch_degree, self.models.sharded(key))

    def _add(self, kind: str, who: str, record: CallRecord, run: RunStats) -> None:
        """Add a call's time to the table, with the sampler's time between two calls. The first call of a run may include warm-up:
        it counts while there is at most one other."""
        if run.begun > 1 or len(self._times.of(kind, who)) < 2:
            self._times.add(kind, who, record.seconds - record.prelude + run.between)

    def measure(
        self, config: RuntimeConfig, target: ModelState, call: ModelCall, run: RunStats, cancelled: Callable[[], bool]
    ) -> Any:
        """Repeat a call on one rank, and record its times. Return its output; None where one rank does not have the memory. With
        sharded weights all ranks compute the same, since they gather blocks together."""
        if not self._fits(target.demand.call):
            return None
        kind = run.now or call.kind(target.kind)
        self.comparing = True
        try:
            out, record = self._run(config, target.key, call, kind, 1, cancelled, repeats=True)
        except RankOutOfMemory as error:
            if not self.pool.alive:
                raise
            log.warning("a call was not measured on one device: rank %d has too little memory for it", error.rank)
            return None
        finally:
            self.comparing = False
        self._add(kind, run.one_rank, record, run)
        self._chooser.compared(kind, self._ranks(config, target.key))
        return out

    def run_exact(self, config: RuntimeConfig, target: ModelState, call: ModelCall, cancelled: Callable[[], bool]) -> Any:
        """Repeat a call in patches, exactly; return its output."""
        exact = replace(config, pipeline=replace(config.staged, patches=1))
        return self._run(exact, target.key, call, call.kind(target.kind), self.pool.world_size, cancelled)[0]

    def _link_is_slow(self, record: CallRecord) -> bool:
        """Return whether a warm call over sharded weights took longer than an estimated one on one device."""
        last, report = self.last_call, record.reports[0]
        waited = report.communication.seconds
        # What the ranks have computed, one after the other. The first call after a load does not count: it has no block in a buffer
        # yet, and sends more weights than the following ones.
        alone = (report.seconds - report.outcome.prelude - waited) * record.at_work
        warm = last is not None and last.reports[0].bytes.get("weights") == report.bytes.get("weights")
        return warm and report.seconds - report.outcome.prelude > alone

    def _fits(self, nbytes: float) -> bool:
        """Return whether the devices have this much memory, in bytes, for a call after the last one."""
        return self.room is None or nbytes <= self.room

    def _run(
        self,
        config: RuntimeConfig,
        key: str,
        call: ModelCall,
        kind: str,
        ranks: int,
        cancelled: Callable[[], bool],
        repeats: bool = False,
    ) -> tuple[Any, CallRecord]:
        """Run a call of the model `key` on `ranks` ranks. Return its output and its record. `repeats`: it is the last one again."""
        began, dropped = time.monotonic(), () if repeats else tuple(self.dropped)
        resident = self.models.resident[key]
        natively = ranks == 1 and resident.casts and not call.compares  # a comparison is of the same rounding
        value, drop, packer = self.models.encoder.encode(call.arguments, {*call.leading, *call.in_place})
        request = Call(
            key=key,
            method=cast(Method, call.method),
            sequence=replace(config.sequence, all_tokens=call.all_tokens),
            ranks=ranks,
            # With sharded weights, ranks fetch blocks together: they must not decide by halves of CFG which ones to run.
            batch_degree=1 if call.mixes_batch or (call.by_conditioning and self.models.sharded(key)) else config.batch_degree,
            by_conditioning=call.by_conditioning,
            leading=call.leading,
            in_place=call.in_place,
            memory=call.memory,
            memory_scale=call.memory_scale,
            compile=call.compile,
            compile_or_raise=config.on_unsupported == "error",
            cancel_every=self.pace.modules_per_check(kind, ranks),
            pipeline=config.staged if resident.choice.placement == STAGED else None,
            is_repeated=(call.compares or call.may_be_retried) and not repeats,
            restores=call.restores and not repeats,
            repeats=repeats,
            natively=natively,
            dropped=dropped,
            value=value,
            drop=drop,
        )
        self.models.begin(resident.name)
        replies = self.pool.request(request, packer, timeout=config.step_timeout, cancelled=cancelled)
        self.models.encoder.delivered()
        del self.dropped[: len(dropped)]
        self._warn_of_left(replies)
        out = self.pool.result(replies, call.device)
        seconds = time.monotonic() - began
        self.pace.note(kind, ranks, seconds, replies[0].modules)
        reports = [replace(reply, value=None) for reply in replies]
        record = CallRecord(
            seconds=seconds,
            reports=reports,
            pids=self.pool.pids,
            fetched=resident.choice.placement in (SHARDED, OFFLOADED),
            most=resident.choice.most,
            casts=resident.casts and not natively,
            sent=packer.nbytes,
        )
        return out, record

    def _warn_of_left(self, reports: Sequence[CallReport]) -> None:
        """Log once which blocks run uncompiled although the graph asks for compiled ones."""
        for block, why in (each for report in reports for each in report.outcome.compiled.left.items()):
            if block not in self._logged_uncompiled:
                self._logged_uncompiled.add(block)
                log.warning("Torch Compile: blocks of kind %s run as they are: %s", block, why)


@contextlib.contextmanager
def _log_errors() -> Iterator[None]:
    """Log errors in a measurement: it may not end a prompt."""
    try:
        yield
    except Exception:
        log.exception("a call was not timed, or runs on all ranks without a choice")
