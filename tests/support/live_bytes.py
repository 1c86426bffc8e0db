"""How much memory a computation or a process holds at one time, where torch keeps no account of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators returned and that still live. torch keeps no such statistics for host memory.

    Memory that is not torch's counts once it is written to: what is only looked at may be another process', which shares it.

    Args:
        before: tensors whose memory does not count.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        looks = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = (leaf.elem if isinstance(leaf, AsyncCollectiveTensor) else leaf).untyped_storage()
                if storage.resizable() or not looks:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._remove, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def private_bytes() -> int:
    """Return bytes of this process that are no pages of a file, as they were read: the kernel's own count; adding up takes long."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most memory that this process had inside, over what it had at the beginning. Read all the time, in a thread."""

    def __enter__(self) -> Peak:
        self.base, self.bytes, self._over = private_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _look(self) -> None:
        self.bytes = max(self.bytes, private_bytes() - self.base)

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._look()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
