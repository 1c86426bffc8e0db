"""The one pool of this process, what its workers hold, and the calls that go to them."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import MirrorError, PoolError
from ...pool.config import RuntimeConfig
from ...pool.protocol import TensorPacker, flatten
from ...pool.settings import load_timeout
from ...pool.tensor_cache import CallEncoder
from ...pool.worker_pool import WorkerPool, WorkerSite
from ..wire.modules import encode_module
from ..wire.weight_patches import encode_patches, patches_digest
from .node_patches import mixes_batch
from .target import Target, verify
from .timing import RunTimer

log = logging.getLogger("context_parallel")

UNLOAD_TIMEOUT = 15.0
RESTART_TIMEOUT = 15.0
NO_MODELS = ("custom_nodes", "datasets", "configs")  # folders that ComfyUI knows and keeps no weights in
IN_PLACE = frozenset({"control"})  # arguments of which each rank copies only its part
SLOW_CALL = 0.5  # seconds; a call that may be slower can be cancelled between blocks
CHECK_INTERVAL = 0.125  # seconds between two looks for Cancel; ranks leave at the second one


class Node(NamedTuple):
    """A node of a prompt that is executed."""

    prompt_id: str
    node_id: str


@dataclass
class CallRecord:
    """One denoise call.

    Args:
        seconds: from call to result, as the sampler sees it.
        ended: when it ended, on the clock of `time.monotonic`.
        reports: what each rank reported.
        pids: of the ranks.
        node: that it ran for, as `Controller.node`.
    """

    seconds: float
    ended: float
    reports: list[dict[str, Any]]
    pids: list[int]
    node: Node | None


@dataclass(frozen=True)
class Resident:
    """A model that the ranks hold: its file's name, and which weight patches are in it."""

    name: str
    patches_uuid: str


@dataclass(frozen=True)
class Failure:
    """The last error of the pool: seconds since the epoch, message, and the rank that caused it where there is one."""

    time: float
    message: str
    rank: int | None


class Controller:
    """Owner of the pool. Prompts run one at a time; the lock covers `/free` and garbage collection from elsewhere.

    Attributes:
        loading: name of the model that goes to the workers now; empty = none.
        node: that uses the pool, or used it last; None where there is no graph.
        changed: set whenever the status changes; who waits for it clears it.
        run: the sampling run that goes on, or went on last.
        one_device: seconds per call on one device, where they were measured, by `RunTimer.kind`.
    """

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        self.records: deque[CallRecord] = deque(maxlen=10_000)
        self.loading = ""
        self.node: Node | None = None
        self.changed = threading.Event()
        self.run = RunTimer(None)
        self.one_device: dict[Any, float] = {}
        self._lock = threading.RLock()
        self.last_error: Failure | None = None
        self._resident: dict[str, Resident] = {}  # by key
        self._owners: Counter[str] = Counter()
        self._forgotten: deque[str] = deque()
        self._encoder = CallEncoder()
        self._attached: set[str] = set()
        self._unused: deque[str] = deque()  # networks of patches that are gone from this process
        self._warm: set[str] = set()
        self._last_kind: object = None
        self._last_seconds, self._last_modules = 0.0, 0
        self._closing = False

    @property
    def models(self) -> list[str]:
        """File names of the models that the workers hold."""
        return sorted({resident.name for resident in list(self._resident.values())})

    @property
    def last_record(self) -> CallRecord | None:
        """The last call of these workers. From any thread."""
        with suppress(IndexError):
            return self.records[-1]
        return None

    def is_resident(self, key: str) -> bool:
        """Whether the workers hold the model."""
        return self.pool is not None and self.pool.alive and key in self._resident

    def load(self, config: RuntimeConfig, target: Target, cancelled: Callable[[], bool]) -> bool:
        """Make the workers' mirror equal to `target`. Returns whether anything was loaded.

        Raises:
            MirrorError: a rank's model is not the UI's.
            PoolError: the pool failed.
        """
        with self._lock, self._noted():
            pool = self._pool_for(config, cancelled)
            resident = self._resident.get(target.key)
            if resident is not None and resident.patches_uuid == target.patches_uuid:
                return False
            packer = TensorPacker()
            tree = flatten(encode_patches(target.patches), packer.add)
            body = {
                "key": target.key,
                "recipe": target.recipe.as_json(),
                "patches": tree,
                "patches_uuid": target.patches_uuid,
                "forget": self._take_forgotten(target.key),
            }
            self._resident.pop(target.key, None)
            name = os.path.basename(target.recipe.path)
            with self._loading(name):
                replies = pool.request("mirror", body, packer, timeout=load_timeout(), cancelled=cancelled)
            verify(target, patches_digest(tree, pool.payload(packer.nbytes)), replies, pool.pids)
            pool.trim()
            self._resident[target.key] = Resident(name, target.patches_uuid)
            self._warm.discard(target.key)  # the next call puts weights and patches on the device
            log.info(
                "%s (%.0f MB, %d patched weights) is on %d ranks after %.1f s",
                name,
                replies[0]["bytes"] / 1e6,
                len(target.patches),
                pool.world_size,
                max(reply["seconds"] for reply in replies),
            )
            return True

    def attach(self, config: RuntimeConfig, networks: Mapping[str, nn.Module], cancelled: Callable[[], bool]) -> None:
        """Give the workers the networks that patches of a call refer to, by key, and take back what is gone. Each travels once."""
        with self._lock, self._noted():
            pool = self._pool_for(config, cancelled)
            gone = [self._unused.popleft() for _ in range(len(self._unused))]
            if gone:
                pool.request("detach", {"keys": gone}, timeout=load_timeout(), cancelled=cancelled)
                self._attached.difference_update(gone)
            for key in networks.keys() - self._attached:
                packer = TensorPacker()
                body = {"key": key, "network": flatten(encode_module(networks[key]), packer.add)}
                pool.request("attach", body, packer, timeout=load_timeout(), cancelled=cancelled)
                pool.trim()
                self._attached.add(key)
                weakref.finalize(networks[key], self._unused.append, key).atexit = False

    def call(
        self,
        config: RuntimeConfig,
        key: str,
        method: str,
        arguments: dict[str, Any],
        volatile: set[str],
        device: torch.device,
        cancelled: Callable[[], bool],
    ) -> Any:
        """Run `method` of the model `key` on all ranks.

        Args:
            arguments: by name; plain data and tensors.
            volatile: names of arguments that change with every call.
            device: where the result goes.
        """
        with self._lock, self._noted():
            began = time.monotonic()
            pool = self._pool_for(config, cancelled)
            message, packer = self._encoder.encode(arguments, volatile, IN_PLACE)
            kind = (key, [value.shape for value in arguments.values() if isinstance(value, torch.Tensor)])
            body = {
                "key": key,
                "method": method,
                "sequence": asdict(config.sequence),
                "batch_degree": 1 if mixes_batch(arguments) else config.batch_degree,
                "volatile": sorted(volatile, key=list(arguments).index),
                "cancel_every": self._modules_per_check(kind),
                **message,
            }
            self.changed.set()
            timeout = config.step_timeout if key in self._warm else max(config.step_timeout, load_timeout())
            replies = pool.request("call", body, packer, timeout=timeout, cancelled=cancelled)
            self._encoder.delivered()
            self._warm.add(key)
            out = pool.result(replies, device)
            self._last_kind, self._last_seconds = kind, time.monotonic() - began
            self._last_modules = replies[0]["modules"]
            reports = [{name: value for name, value in reply.items() if name != "value"} for reply in replies]
            self.records.append(CallRecord(self._last_seconds, time.monotonic(), reports, pool.pids, self.node))
            return out

    def unload(self, key: str) -> None:
        """Make the workers drop a model, and the conditioning they keep. Never raises."""
        with self._lock:
            if self.pool is None or not self.is_resident(key):
                return
            del self._resident[key]
            self._encoder.reset()
            self._attached.clear()
            # ComfyUI's memory manager calls this, from a thread that an exception would end.
            try:
                with self._noted():
                    self.pool.request("unload", {"key": key}, timeout=UNLOAD_TIMEOUT)
                    self.pool.trim()
            except PoolError as error:
                log.error("the workers did not unload and are restarted on next use: %s", error)
                self.pool.kill()

    def restart(self) -> bool:
        """Kill the workers, whatever they do, and start them again; a running prompt fails. From any thread, but not from ComfyUI's
        event loop: it takes as long as a start. Returns whether there were any.

        Raises:
            PoolError: they did not start, or the prompt that used them did not end.
        """
        pool = self.pool
        if pool is None:
            return False
        pool.abort("the workers were restarted on request, in the middle of this prompt. Queue it again.")
        if not self._lock.acquire(timeout=RESTART_TIMEOUT):
            raise PoolError("the workers were killed; they start with the next prompt, because this one has not ended yet")
        try:
            if self.pool is pool and not self._closing:  # else the next prompt was faster
                pool.close()
                self._reset()
                self.node = None  # none waits for them
                with self._noted():
                    self._launch(pool.config)
        finally:
            self._lock.release()
        return True

    def own(self, key: str) -> None:
        """A model of the UI process uses this key."""
        self._owners[key] += 1

    def disown(self, key: str) -> None:
        """A model that used this key was garbage-collected. May run in any thread, inside anything: takes no lock."""
        self._owners[key] -= 1
        if self._owners[key] <= 0:
            self._forgotten.append(key)

    def close(self) -> None:
        """End the workers, at exit. A call that runs in another thread is not waited for."""
        self._closing = True
        if self.pool is not None and not self._lock.acquire(timeout=0.1):
            self.pool.kill_processes()
            return
        if self.pool is not None:
            self.pool.close()
            self._reset()
            self._lock.release()

    def _pool_for(self, config: RuntimeConfig, cancelled: Callable[[], bool]) -> WorkerPool:
        if self.pool is not None and (not self.pool.alive or _pool_key(self.pool.config) != _pool_key(config)):
            self.pool.close()
            self._reset()
        if self._closing:
            raise PoolError("ComfyUI is shutting down")
        if self.pool is None:
            log.info("starting %d ranks on %s", config.world_size, ", ".join(config.devices))
            return self._launch(config, cancelled)
        return self.pool

    def _launch(self, config: RuntimeConfig, cancelled: Callable[[], bool] | None = None) -> WorkerPool:
        pool = self.pool = WorkerPool(config, worker_site())  # others may look at it, and abort it, while it starts
        self.changed.set()
        pool.start(cancelled)
        return pool

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error of the pool for the status."""
        try:
            yield
        except (PoolError, MirrorError) as error:
            self.last_error = Failure(time.time(), str(error), getattr(error, "rank", None))
            raise
        finally:
            self.changed.set()

    @contextmanager
    def _loading(self, name: str) -> Iterator[None]:
        self.loading = name
        self.changed.set()
        try:
            yield
        finally:
            self.loading = ""

    def _modules_per_check(self, kind: object) -> int:
        """How many planned modules the ranks pass between two looks for Cancel; 0 = they do not look."""
        if kind != self._last_kind:
            return 1
        return max(1, int(self._last_modules * CHECK_INTERVAL / self._last_seconds)) if self._last_seconds > SLOW_CALL else 0

    def _reset(self) -> None:
        self.pool = None
        self.records.clear()
        self._resident.clear()
        self._encoder.reset()
        self._attached.clear()
        self._warm.clear()
        self._last_kind = None
        self.changed.set()

    def _take_forgotten(self, wanted: str) -> list[str]:
        gone = []
        while self._forgotten:
            key = self._forgotten.popleft()
            if key != wanted and self._owners[key] <= 0 and self._resident.pop(key, None) is not None:
                gone.append(key)
        return gone


def _pool_key(config: RuntimeConfig) -> tuple[Any, ...]:
    return config.devices, config.backend, max(config.step_timeout, load_timeout())


def worker_site() -> WorkerSite:
    """Where the workers find this process's ComfyUI and its models."""
    import comfy.model_management
    import comfy.options
    import folder_paths

    registered = {name: folders for name, (folders, _) in folder_paths.folder_names_and_paths.items() if name not in NO_MODELS}
    folders = {os.path.abspath(folder) for folders in registered.values() for folder in folders}
    return WorkerSite(
        service="comfy.worker.service",
        arguments={"model_folders": sorted(folders)},
        path=(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_management.__file__))),),
        # Where another program embeds ComfyUI, the command line is not ComfyUI's.
        argv=("main.py", *(sys.argv[1:] if comfy.options.args_parsing else ())),
    )


CONTROLLER = Controller()
atexit.register(CONTROLLER.close)
