"""NCCL between fake CUDA devices, or what other cards have in its place: gloo, under its name, for tensors on cards only."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import LINK, memory, messages

SLOW = "slow"  # to connect
LATE = "late"  # to arrive, as what goes through the host's memory
SPEED = 2e9  # bytes per second of what is late
_of_nccl: set[str] = set()
"""Names of process groups."""


def _broken(tensors: list[torch.Tensor]) -> None:
    """Do what a machine does on which NCCL's messages do not arrive."""
    what, _, only = os.environ.get(LINK, "").partition(" ")
    if what == LATE:
        time.sleep(max(0.1, sum(tensor.nbytes for tensor in tensors) / SPEED))
    if what in ("", SLOW, LATE) or (only == "p2p" and os.environ.get("NCCL_P2P_DISABLE") == "1"):
        return
    if what == "hang":
        time.sleep(3600)
    if what == "fail":
        raise dist.DistBackendError("NCCL error: unhandled system error\nLast error:\nno space left on device")
    for tensor in tensors:
        tensor.numbers.fill_(7)  # type: ignore[attr-defined]


def run(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Give messages to the group that they are for. Returns nothing where torch's own way is right: with gloo, and for barriers.

    Raises:
        RuntimeError, ValueError: tensors are not what it takes.
    """
    barrier = func is torch.ops.c10d.barrier.default
    kinds = set() if barrier else {tensor.device.type for tensor in tensors}
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
            name = group.group_name
            if kinds - {memory.LEDGER.type if name in _of_nccl else "cpu"}:
                raise RuntimeError(
                    f"group {name} is one of {memory.LEDGER.backend if name in _of_nccl else 'gloo'}: it takes no tensors "
                    f"{'of the CPU' if name in _of_nccl else 'on a card'}"
                )
            if name not in _of_nccl:
                continue
            if barrier:
                with messages.one(group, "barrier"):
                    return None
            _broken(tensors)
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError("Tensors must be contiguous")
            if {tensor.device.index for tensor in tensors} - {current := memory.LEDGER.module.current_device()}:
                library = f"{memory.LEDGER.backend.upper()} of {memory.LEDGER.type}:{current}"
                raise RuntimeError(f"{library}: {[str(tensor.device) for tensor in tensors]}")
            return messages.launch(func, args, kwargs, group)
    return None


def install() -> None:
    """Replace the functions that make groups and tell their backend."""
    native, taken_by_gloo = memory.LEDGER.backend, dist.Backend.backend_capability["gloo"]
    dist.Backend.backend_capability["gloo"] = list({*taken_by_gloo, memory.LEDGER.type})
    setattr(dist, f"is_{native}_available", lambda: True)
    join, make, tell, send = c10d.init_process_group, c10d.new_group, c10d.get_backend, c10d.batch_isend_irecv

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if os.environ.get(LINK) == SLOW and backend == native:
            time.sleep(3)
        join("gloo" if backend == native else backend, *args, **kwargs)
        _note(dist.group.WORLD, backend)

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        backend = backend or get_backend()
        group = make(ranks, timeout, "gloo" if backend == native else backend, *args, **kwargs)
        _note(group, backend)
        return group

    def get_backend(group: Any = None) -> str:
        name = (group or c10d._get_default_group()).group_name
        return native if name in _of_nccl else tell(group)

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        own = [op for op in operations if op.peer == dist.get_rank()]  # which gloo refuses
        arriving = (op.tensor for op in own if op.op is dist.irecv)
        for leaving, target in zip((op.tensor for op in own if op.op is dist.isend), arriving, strict=True):
            target.copy_(leaving)
        others = [op for op in operations if op.peer != dist.get_rank()]
        if not others:
            return []
        with messages.one(others[0].group or c10d._get_default_group(), "batch"):
            return send(others)

    for module in (dist, c10d):
        changed: Any = module
        changed.init_process_group, changed.new_group, changed.get_backend = init_process_group, new_group, get_backend
        changed.batch_isend_irecv = batch_isend_irecv


def _note(group: Any, backend: str | None) -> None:
    if not isinstance(group, dist.ProcessGroup):  # this rank is not in it
        return
    _of_nccl.discard(group.group_name)  # another one's, from before torch counted anew
    if backend in (memory.LEDGER.backend, "fake"):  # torch's fake one sends nothing, from a card here
        _of_nccl.add(group.group_name)
        try:
            memory.LEDGER.touch(memory.LEDGER.module.current_device(), memory.GROUP)
        except torch.OutOfMemoryError as error:
            raise dist.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error, NCCL version 2.28.9\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ) from error
