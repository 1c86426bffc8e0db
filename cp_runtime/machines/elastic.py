"""torch elastic's agent, one on every machine: it meets the others, and starts a relay whenever machines come or go.

Launch, supervision, rendezvous, and what happens when a machine joins or is gone are torch elastic's. Ours is the store that they
meet in: it listens on one address, which torch's own would not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .join import OVER, PROGRAM, for_child

BACKEND = "machines"  # name of our rendezvous to torch elastic
MOST = 16  # machines
_STORE_TIMEOUT = timedelta(seconds=10)
_RESTARTS = 1 << 20
# torch elastic counts a machine as gone after their product, in seconds.
_KEEP_ALIVE, _ATTEMPTS = 1, 4


class Rendezvous(DynamicRendezvousHandler):
    """torch's, but an agent that ends does not close it for the others: they, or this machine, may go on or come back."""

    def get_backend(self) -> str:
        return BACKEND

    def shutdown(self) -> bool:
        return True


def run(spec: dict[str, Any]) -> NoReturn:
    """Be an agent until the parent ends, or until the relay fails on a machine that joins; then end this process.

    Args:
        spec: `address` of this machine; `host`, whether ComfyUI runs here; where not, `store`, the address
            and port of the store; `run_id` of the rendezvous. The agent of the host prints that port.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    for number in (signal.SIGTERM, signal.SIGINT):  # the kernel ends its relay with it
        signal.signal(number, lambda *_: os._exit(OVER))
    # Without it the first agent does not publish its store again in the second round, and all wait for each other.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with contextlib.suppress(ChildFailedError, RendezvousError, dist.DistError):
        _launch(spec)
    os._exit(OVER)  # threads of the rendezvous may wait for a store that is gone


def _launch(spec: dict[str, Any]) -> None:
    if spec["host"]:
        store = _listening_store(spec["address"])
        spec["store"] = [spec["address"], store.port]
        sys.stdout.write(f"{store.port}\n")
        sys.stdout.flush()
    else:
        address, port = spec["store"]
        store = dist.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    os.environ.update(for_child(spec))

    def create(given: RendezvousParameters) -> DynamicRendezvousHandler:
        second = timedelta(seconds=1)
        handler: DynamicRendezvousHandler = Rendezvous.from_backend(
            given.run_id, store, C10dRendezvousBackend(store, given.run_id), given.min_nodes, given.max_nodes, given.local_addr,
            RendezvousTimeout(join=600 * second, last_call=second, close=30 * second, heartbeat=5 * second),
            keep_alive_interval=_KEEP_ALIVE, keep_alive_max_attempt=_ATTEMPTS,
        )  # fmt: skip
        return handler

    rendezvous_handler_registry.register(BACKEND, create)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=MOST,
        nproc_per_node=1,
        run_id=spec["run_id"],
        rdzv_backend=BACKEND,
        rdzv_endpoint="{}:{}".format(*spec["store"]),
        max_restarts=_RESTARTS if spec["host"] else 0,
        monitor_interval=0.1,
        local_addr=spec["address"],
    )
    elastic_launch(config, sys.executable)("-u", PROGRAM, "--relay")


def _listening_store(address: str) -> dist.TCPStore:
    """Return the store of all machines, in this process. It listens on this address alone."""
    with socket.create_server((address, 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
