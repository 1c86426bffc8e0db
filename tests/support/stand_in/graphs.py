"""Fake CUDA graphs: what is launched while one is recorded runs whenever it is replayed, on the same memory, and not before.

Results of what is recorded are NaN until then. What would make the host wait ends a recording, as a card does, and so do a stream
that is the default one, and events of other threads (NCCL's watchdog has some) unless they are allowed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import memory, messages, races

FAULT = "CP_TEST_GRAPH_FAULT"
"""Environment variable: `end RANK`, recording fails there; `differ RANK`, what is replayed there is something else."""
_local = threading.local()
_pools = iter(range(1, 1 << 30))
INVALID = "CUDA error: operation failed due to a previous error during capture"


def pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def current() -> CUDAGraph | None:
    """What this thread records."""
    graph: CUDAGraph | None = getattr(_local, "graph", None)
    return graph


def refuse(what: str) -> None:
    """End a recording if one is under way, at what it cannot hold."""
    graph = current()
    if graph is not None:
        graph.invalid = True
        raise memory.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing ({what})")


def _fault(what: str) -> bool:
    asked, _, rank = os.environ.get(FAULT, "").partition(" ")
    return asked == what and int(rank) == dist.get_rank()


class CUDAGraph:
    """A recording."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Callable[[], object]] = []
        self._results: list[Tensor] = []
        self.invalid = self._ended = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        module = memory.LEDGER.module
        if module.current_stream().cuda_stream == module.default_stream().cuda_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if dist.is_initialized() and capture_error_mode == "global":
            raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")
        _local.graph = self

    def capture_end(self) -> None:
        _local.graph = None
        if self.invalid or _fault("end"):
            raise memory.AcceleratorError(INVALID)
        for numbers in self._results:
            if numbers.is_floating_point():
                with _disable_current_modes(), torch.inference_mode(numbers.is_inference()):
                    numbers.fill_(torch.nan)
        self._ended = True

    def replay(self) -> None:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for step in self._steps:
            step()

    def reset(self) -> None:
        self._steps.clear()
        self._results.clear()
        self._ended = False

    def operation(self, run: Callable[[], Any], results: Any, known: list[Tensor]) -> None:
        """Note an operation, and where its results are. `known`: numbers that it was given."""
        given = {tensor.untyped_storage().data_ptr() for tensor in known}
        made = [tensor.numbers for tensor in races.flat(results) if hasattr(tensor, "numbers")]
        fresh = [None if numbers.untyped_storage().data_ptr() in given else numbers for numbers in made]
        self._results += [numbers for numbers in fresh if numbers is not None]

        def again() -> None:
            out = [tensor.numbers for tensor in races.flat(run()) if hasattr(tensor, "numbers")]
            for target, source in zip(fresh, out, strict=True):
                if target is not None:
                    with _disable_current_modes(), torch.inference_mode(target.is_inference()):
                        target.copy_(source)
                        if _fault("differ") and target.is_floating_point():
                            target.mul_(1.001)

        self._steps.append(again)

    def message(self, func: Any, args: Any, kwargs: Any, group: Any) -> Any:
        """Note a launch of NCCL. Nothing is sent now."""
        under_way: list[Any] = []
        batched = messages.in_one()

        def begin() -> None:
            with messages.one(group, "batch") if batched else contextlib.nullcontext():
                out = messages.launch(func, args, kwargs, group)
            under_way.append(dist.Work.unbox(out if isinstance(out, torch.ScriptObject) else out[-1]))

        self._steps.append(begin)
        work = Work(self, under_way)
        _local.last = work  # until torch has handed it to the caller
        boxed = work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


class Work(dist.Work):
    """Of a recorded launch."""

    def __init__(self, graph: CUDAGraph, under_way: list[Any]) -> None:
        super().__init__()
        self._graph, self._under_way = graph, under_way

    def wait(self, timeout: Any = None) -> bool:
        if current() is not self._graph:
            raise RuntimeError("a message of a recording is waited for outside of it")
        self._graph._steps.append(lambda: self._under_way.pop().wait())
        return True
