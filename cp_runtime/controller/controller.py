"""The only owner of the workers in this process: starts, uses, restarts and ends them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from ..errors import ChangedFileError, MirrorError, PoolError, ProtocolError, RankError, RankOutOfMemory
from ..nested import difference
from ..pool.config import RuntimeConfig, WorkerSite
from ..pool.messages import Fetch
from ..pool.peers import forget_fallbacks
from ..pool.settings import WHOLE
from ..pool.worker_pool import CallCancelled
from ..timing.times import Times
from .calls import ModelCall, ModelState
from .journal import Journal, KeptPreferences
from .placement import Resident, Shortages
from .prompt_times import LOADING
from .run_stats import CallRecord, Node
from .workers import Workers

log = logging.getLogger("context_parallel")

RESTART_TIMEOUT = 15.0  # seconds for a prompt to end after its workers are killed
CLOSE_TIMEOUT = 3.0  # the same, at exit
RETRY_MEMORY_FACTOR = 2.0  # on the expected memory of a call that ran out of it; after a second time the prompt fails
POLL = 0.1  # seconds between two polls for Cancel while another thread holds the lock


class Kept(NamedTuple):
    """Workers that keep tensors which patches have noted."""

    controller: Controller
    workers: Workers

    @property
    def alive(self) -> bool:
        return self.controller.workers is self.workers and self.workers.pool.alive

    def fetch(self, number: int, device: torch.device) -> torch.Tensor:
        return self.controller.fetch(self.workers, number, device)

    def drop(self, number: int) -> None:
        self.workers.dropped.append(number)


class Controller:
    """Owner of the workers. Every user holds the lock from beginning to end: a call, a load by ComfyUI's memory manager, a restart.

    Attributes:
        workers: None before the first use. Another thread may replace it, so read it once per use.
        times: of calls and starts, also those of earlier processes.
        journal: outlives the workers.
        preferences: for graphs without settings.
    """

    def __init__(
        self,
        site: Callable[[], WorkerSite],
        free_for_ranks: Callable[[Sequence[str]], None],
    ) -> None:
        self._site, self._free_for_ranks = site, free_for_ranks
        self.workers: Workers | None = None
        self.times = Times()
        self.journal = Journal(self.times)
        self.preferences = KeptPreferences()
        # Reentrant: making room inside a call unloads models of this process, and `unload` comes back here.
        self._lock = threading.RLock()
        self._shortages = Shortages()
        self._owners: dict[str, WeakSet[Any]] = {}  # models of this process, by key
        self._restarting: Future[bool] | None = None
        self._restarting_lock = threading.Lock()
        self._closing = False

    @property
    def in_use(self) -> bool:
        """Whether there are ranks, or will be in a moment."""
        workers = self.workers
        return workers is not None and (workers.pool.alive or workers.pool.command == "start")

    def resident(self, key: str) -> Resident | None:
        return None if (workers := self.workers) is None else workers.models.held.get(key)

    def on_device(self, key: str) -> bool:
        """Return whether the workers hold a model on this process's device, or move it there for the next call."""
        return (resident := self.resident(key)) is not None and not resident.aside

    def load(self, config: RuntimeConfig, target: ModelState, node: Node | None, cancelled: Callable[[], bool]) -> None:
        """Make the workers' model equal to `target`, and start the workers if there are none.

        Raises:
            MirrorError: a rank's model is not the UI's.
            PoolError: the pool failed.
            CallCancelled: `cancelled` returned True.
        """
        self.journal.node = node
        with self._exclusive(cancelled), self._recorded():
            self._loaded(config, target, cancelled)

    def call(
        self, config: RuntimeConfig, target: ModelState, call: ModelCall, node: Node | None, cancelled: Callable[[], bool]
    ) -> Any:
        """Run a call of the model `target` and return its output.

        The model is loaded first if the workers hold another state of it: two guiders may use the same file with different LoRA,
        and the pool may have been lost since the last call. If a rank runs out of memory, room is made and the call is repeated
        once. Raises the errors of `load`, and RankOutOfMemory the second time.
        """
        self.journal.node, began = node, time.monotonic()

        def run(call: ModelCall) -> tuple[Any, CallRecord]:
            workers = self._loaded(config, target, cancelled)
            if call.unlisted is not None and call.compares:
                call.unlisted.check_devices(workers.pool.device_names)
            workers.models.compare_code(call.code, cancelled)
            workers.models.attach_networks(call, target.key, cancelled)
            return workers.call(config, target, call, node, self.journal.run, cancelled)

        with self._exclusive(cancelled), self._recorded():
            try:
                out, record = run(call)
            except RankOutOfMemory as error:
                log.warning("rank %d ran out of memory; making room for the call and trying it again", error.rank)
                self._make_room(config, target)
                # Within the transaction, so that nobody else takes the room that was made.
                out, record = run(replace(call, memory_scale=call.memory_scale * RETRY_MEMORY_FACTOR))
            except RankError as error:
                if error.kind != ChangedFileError.__name__:
                    raise
                log.warning("rank %d: %s; the model is loaded again", error.rank, error.message)
                self._forget(target.key)
                out, record = run(call)
            self.journal.prompt.take(LOADING, record.prelude)
            if record.busy > 1:
                self.journal.prompt.share()
            if call.sampling:
                self.journal.run.add(record)
                self._check_unlisted(config, target, call, out, record, cancelled)
                extra = self._compare(config, target, call, out, record, cancelled)
                self.journal.run.inside(time.monotonic() - began, extra)
            return out

    def fetch(self, workers: Workers, number: int, device: torch.device) -> torch.Tensor:
        """Return a tensor that patches have noted on these workers. Raises PoolError: they are gone."""
        with self._lock:
            if self.workers is not workers:
                raise PoolError("a node reads a tensor that the workers had before their restart. Queue the prompt again.")
            value: torch.Tensor = workers.pool.result(workers.pool.request(Fetch(number=number)), device)
            return value

    def unload(self, key: str) -> None:
        """Make the workers drop a model, and their cached conditioning. Never raises."""
        if self.resident(key) is None:  # do not wait for the lock with nothing to do
            return
        with self._lock:
            self._forget(key)

    def make_room(self, device: torch.device, key: str | None = None) -> None:
        """Free the ranks' cached memory on a device. Never raises. The model `key` leaves it as well until its next call."""
        workers = self.workers
        if workers is None or str(device) not in workers.pool.config.devices or not (key is None or self.on_device(key)):
            return  # do not wait for the lock with nothing to do
        with self._lock:
            if workers is self.workers and workers.pool.alive and (key is None or self.on_device(key)):
                self._free(workers, partial(workers.models.make_room, str(device), key))

    def restart(self) -> Future[bool]:
        """Kill the workers, whatever they do, and start them again; a prompt in a call fails. Returns at once, in any thread.

        A request during a restart joins it. The result is False if there were no workers, and a PoolError if they did not start or
        the prompt that used them did not end.
        """
        with self._restarting_lock:
            if self._restarting is None or self._restarting.done():
                self._restarting = Future()
                self._restarting.set_running_or_notify_cancel()
                # A daemon thread: Python joins all others at exit before it runs `close`, which ends the workers.
                threading.Thread(target=self._restart, args=(self._restarting,), name="restart of workers", daemon=True).start()
            return self._restarting

    def own(self, key: str, model: Any, before: str) -> None:
        """Register a model of this process under a key: the ranks keep theirs while it exists, and is in that state. `before`: the
        key of its state before; "" = none."""
        self._owners.setdefault(before, WeakSet()).discard(model)
        self._owners.setdefault(key, WeakSet()).add(model)

    def close(self) -> None:
        """End the workers, at exit. A thread that uses them gets an error."""
        self._closing = True
        workers = self.workers
        if workers is None:
            return
        if not self._lock.acquire(timeout=POLL):
            workers.pool.abort("ComfyUI is shutting down")
            if not self._lock.acquire(timeout=CLOSE_TIMEOUT):
                return
        try:
            self._end()
        finally:
            self._lock.release()

    def _check_unlisted(
        self,
        config: RuntimeConfig,
        target: ModelState,
        call: ModelCall,
        out: Any,
        record: CallRecord,
        cancelled: Callable[[], bool],
    ) -> None:
        """Check a call with patches that no table lists; compare some with one device."""
        if call.unlisted is None or self.workers is None:
            return
        alone = None
        if record.at_work > 1 and call.compares:
            log.info("running this call once more, on one device: %s", call.unlisted)
            alone = self.workers.measure(config, target, call, self.journal.run, cancelled)
        outcomes = [report.outcome for report in record.reports]
        call.unlisted.check(None if alone is None else difference(out, alone), outcomes, Kept(self, self.workers))

    def _compare(
        self,
        config: RuntimeConfig,
        target: ModelState,
        call: ModelCall,
        out: Any,
        record: CallRecord,
        cancelled: Callable[[], bool],
    ) -> float:
        """Repeat a call on one device, if requested or worth its time. Record its seconds there and the difference of `out` from
        its result, for a call in patches from the exact result.

        Returns the seconds that belong to no call of the run.
        """
        journal, workers = self.journal, self.workers
        if journal.run.begun < 2 or workers is None:  # the first call warms up
            return 0.0
        if record.at_work == 1:
            journal.measured()
            return 0.0
        asked = journal.measuring
        if self.preferences.chosen.measure and journal.is_worth_measuring(record):
            journal.measuring = True
        if not journal.measuring:
            return 0.0
        if journal.run.kind is None:
            journal.measured("sizes")
            return 0.0
        staged, began = record.reports[0].outcome.staged, time.monotonic()
        try:
            if staged is None:
                log.info("running this call once more, on one device, to compare with")
                if asked:
                    journal.forget()
                alone = workers.measure(config, target, call, journal.run, lambda: cancelled() or not journal.measuring)
                if alone is None:
                    journal.measured("memory")
                else:
                    journal.measured(difference=difference(out, alone))
            elif staged.patches == config.staged.patches:  # no warm-up call
                exact = workers.run_exact(config, target, call, cancelled) if staged.patches > 1 else out
                journal.measured("staged", difference(out, exact) if staged.patches > 1 else None)
        except CallCancelled:
            if cancelled():  # the prompt; the next one measures, if requested
                journal.measuring = asked
                raise
            journal.measured("cancelled")
        except Exception as error:  # noqa: BLE001  (the prompt has its result; the next run need not fail as well)
            journal.measured("failed")
            self._failed(error)
            log.warning("a call was not compared with one device: %s: %s", type(error).__name__, error)
        return time.monotonic() - began

    def _make_room(self, config: RuntimeConfig, target: ModelState) -> None:
        """Free the ranks' devices: remove the models of the ranks, and idle ones of this process. `target`: the model that needs
        the room; it may take less from now on."""
        workers = self.workers
        if workers is not None:
            workers.models.use_less_memory(target)
        while workers is not None and workers.models.held:  # none, where the pool failed
            self._unload(workers, next(iter(workers.models.held)))
        self._free_for_ranks(config.local)

    def _forget(self, key: str) -> None:
        """Make the ranks drop a model, if they live."""
        if self.workers is not None and key in self.workers.models.held:
            self._unload(self.workers, key)

    def _unload(self, workers: Workers, key: str) -> None:
        self._free(workers, partial(workers.models.unload, key))

    def _free(self, workers: Workers, free: Callable[[], None]) -> None:
        try:
            free()
        except Exception as error:  # noqa: BLE001  (any error would end the thread of ComfyUI's queue)
            self._failed(error)
            log.error("the workers did not free their devices and are restarted on next use: %s: %s", type(error).__name__, error)
            workers.pool.kill()
        self.journal.changed.set()

    def _loaded(self, config: RuntimeConfig, target: ModelState, cancelled: Callable[[], bool]) -> Workers:
        """Return workers that fit `config` and hold the model `target`."""
        workers = self.workers
        if workers is None or not workers.serves(config):
            workers = self._start(config, cancelled)
        unused = {key for key, models in list(self._owners.items()) if not models and key != target.key}
        workers.models.drop(unused & workers.models.held.keys(), cancelled)
        if not workers.models.has(config, target):
            choice = workers.models.choose_placement(config, target, cancelled)
            if choice.placement != WHOLE or choice.most:  # idle models of this process may be in the way
                self._free_for_ranks(config.local)
                choice = workers.models.choose_placement(config, target, cancelled)
            workers.models.load(config, target, choice, cancelled)
        workers.models.held[target.key].aside = False
        return workers

    def _start(self, config: RuntimeConfig, cancelled: Callable[[], bool] | None = None) -> Workers:
        self._end()
        if self._closing:
            raise PoolError("ComfyUI is shutting down")
        log.info("starting %d ranks on %s", config.world_size, ", ".join(config.devices))
        # Visible while they start, so that they can be aborted.
        workers = self.workers = Workers(config, self._site(), self.journal.changed.set, self._shortages, self.times)
        self.journal.changed.set()
        try:
            workers.start(cancelled)
        except CallCancelled:
            self._end()  # nothing has failed
            raise
        return workers

    def _end(self) -> None:
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.pool.close()
            self.journal.changed.set()

    def _restart(self, done: Future[bool]) -> None:
        try:
            done.set_result(self._restart_now())
        except BaseException as error:  # noqa: BLE001  (raised where the result is read)
            done.set_exception(error)

    def _restart_now(self) -> bool:
        workers = self.workers
        if workers is None:
            return False
        workers.pool.abort("the workers were restarted on request, in the middle of this prompt. Queue it again.")
        if not self._lock.acquire(timeout=RESTART_TIMEOUT):
            raise PoolError("the workers were killed; they start with the next prompt, because this one has not ended yet")
        try:
            if self.workers is workers:  # else the next prompt was faster
                self.journal.node = None  # no node waits for them
                self._shortages.forget()
                forget_fallbacks()
                with self._recorded():
                    self._start(workers.pool.config)
                self.journal.last_error = None
        finally:
            self._lock.release()
        return True

    @contextmanager
    def _exclusive(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock. Another thread may hold it for as long as workers take to start, so Cancel is polled meanwhile."""
        while not self._lock.acquire(timeout=POLL):
            if cancelled():
                raise CallCancelled
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
            if self.workers is not None and self.workers.pool.alive:  # a comparison may have ended it
                self.workers.failure = None
        except (PoolError, MirrorError, ProtocolError) as error:
            self._failed(error)
            raise
        finally:
            self.journal.changed.set()

    def _failed(self, error: BaseException) -> None:
        workers = self.workers
        failure = self.journal.fail(error, self.journal.node, () if workers is None else workers.pool.config.devices)
        if workers is not None:
            workers.failure = failure
