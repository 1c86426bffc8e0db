"""Pools without ComfyUI, in this process: their ranks know the commands `echo` and `shutdown`, and start in a few seconds."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.messages import Echo, Value
from cp_runtime.pool.protocol import TensorPacker, flatten
from cp_runtime.pool.worker_pool import WorkerPool


@contextmanager
def small_pool(ranks: int = 2, **settings: Any) -> Iterator[WorkerPool]:
    """A started pool."""
    pool = make_pool(ranks, **settings)
    pool.start()
    try:
        yield pool
    finally:
        pool.kill()


def make_pool(ranks: int = 2, site: WorkerSite | None = None, on: str = "cpu", **settings: Any) -> WorkerPool:
    """A pool that is to be started, on devices of a type; `settings` are those of its config."""
    inventory = DeviceInventory(type=on, count=0 if on == "cpu" else ranks)
    return WorkerPool(RuntimeConfig.resolve(inventory=inventory, world_size=ranks, **settings), site or WorkerSite())


def echo(pool: WorkerPool, value: Tensor, timeout: float = 30.0, cancelled: Callable[[], bool] | None = None) -> Tensor:
    """Send a tensor through rank 0 and back."""
    out: Tensor = pool.result(request_echo(pool, value, timeout, cancelled), torch.device("cpu"))
    return out


def request_echo(
    pool: WorkerPool, value: Tensor, timeout: float = 30.0, cancelled: Callable[[], bool] | None = None
) -> list[Value]:
    """Send a tensor to all ranks. Returns their replies."""
    packer = TensorPacker()
    request = Echo(value=flatten({"x": value}, packer.add), drop=())
    return pool.request(request, packer, timeout=timeout, cancelled=cancelled)


def hold(pool: WorkerPool, rank: int) -> None:
    """Stop a rank, so that it misses any deadline: a report that is there when one is looked for counts, even after it."""
    os.kill(pool.pids[rank], signal.SIGSTOP)
