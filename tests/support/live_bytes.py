"""How much memory a computation holds at one time, where torch keeps no account of it."""

from __future__ import annotations

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

    Args:
        before: tensors whose memory does not count.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add((leaf.elem if isinstance(leaf, AsyncCollectiveTensor) else leaf).untyped_storage())
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
