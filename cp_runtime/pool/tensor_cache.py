"""Arguments of a call as a message without the tensors that the ranks have already, and back.

Conditioning is the same in every step; only the latent and the timestep change. A rank leaves arguments in the memory that it
shares with the controller, until it knows its part of the call.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from ..nested import map_tensors
from .messages import Packed
from .processors import one_thread
from .protocol import TensorPacker, Tree, flatten, read_tensor, unflatten

CACHE_LIMIT = 512 << 20  # bytes kept per rank
MIN_CACHED = 4096  # bytes up to which a tensor is not worth keeping


class CallEncoder:
    """Encodes calls, and mirrors which tensors every rank keeps.

    ComfyUI builds new tensors with the same content for every step. They are compared by content, in the host's memory, so a hit is
    always right, and nothing is kept of a device that a rank may need.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, Tensor]] = OrderedDict()
        self._numbers = itertools.count()
        self._in_step = True  # whether the ranks keep what `_kept` says

    @one_thread()
    def encode(self, arguments: dict[str, Any], changing: Set[str]) -> tuple[Tree, tuple[str, ...] | None, TensorPacker]:
        """Return the arguments as a tree, keys that ranks are to forget (None: all), and the tensors to send. Ranks do not keep
        those of `changing`, arguments that change with every call."""
        # Until every rank has confirmed this message: one that fails before it unpacks lacks what `_kept` says from here on.
        start_over, self._in_step = not self._in_step, False
        if start_over:
            self._kept.clear()
        packer, used, on_host = TensorPacker(), set[str](), dict[int, Tensor]()

        def store(tensor: Tensor, path: str) -> Tree:
            if tensor.nbytes <= MIN_CACHED or any(path.startswith(f"[{name!r}]") for name in changing):
                return packer.add(tensor, path)
            tensor = on_host.setdefault(id(tensor), tensor.to("cpu"))  # by object: the packer lays each out once
            key = self._find(path, tensor)
            leaf: Tree = {"$cached": key}
            if key is None:
                key = self._add(path, tensor)
                leaf = {"$store": [key, packer.add(tensor, path)]}
            used.add(key)
            return leaf

        value = flatten(arguments, store)
        return value, None if start_over else tuple(self._evict(used)), packer

    def delivered(self) -> None:
        """Note that every rank has taken the last message. Without this, the next one starts over."""
        self._in_step = True

    def reset(self) -> None:
        """Note that the ranks keep nothing: they were told to, or are gone."""
        self._kept.clear()
        self._in_step = True

    def _find(self, path: str, tensor: Tensor) -> str | None:
        for key, (kept_path, kept) in self._kept.items():
            same_kind = (kept_path, kept.shape, kept.dtype) == (path, tensor.shape, tensor.dtype)
            if same_kind and same_bits(kept, tensor):
                self._kept.move_to_end(key)
                return key
        return None

    def _add(self, path: str, tensor: Tensor) -> str:
        key = f"c{next(self._numbers)}"
        self._kept[key] = (path, tensor.clone(memory_format=torch.contiguous_format))
        return key

    def _evict(self, used: Set[str]) -> list[str]:
        """Forget the least recently used tensors above the limit, never one in `used`; return their keys."""
        dropped, size = [], sum(kept.nbytes for _, kept in self._kept.values())
        for key in [key for key in self._kept if key not in used]:
            if size > CACHE_LIMIT:
                size -= self._kept.pop(key)[1].nbytes
                dropped.append(key)
        return dropped


def same_bits(kept: Tensor, tensor: Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype have the same bits (so that NaN equals NaN). `kept` is contiguous."""
    a, b = kept.reshape(-1), tensor.contiguous().reshape(-1)
    wide = kept.nbytes % 8 == 0 and b.storage_offset() * b.element_size() % 8 == 0
    word = torch.int64 if wide else torch.uint8  # eight bytes at a time is several times faster
    return torch.equal(a.view(word), b.view(word))


class TensorCache:
    """The other side of `CallEncoder`, on every rank. `device`: where tensors are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def unpack(self, message: Packed[Any], block: Tensor) -> Any:
        """Rebuild the value of a message, from its payload and from what is kept here.

        The tensors are the payload's memory, which the next message overwrites, and what is kept here: see `owned`.
        """
        if message.drop is None:
            self._kept.clear()
        for key in message.drop or ():
            del self._kept[key]

        views: dict[str, Tensor] = {}  # a tensor that comes several times stays one object

        def load(leaf: dict[str, Any]) -> Tensor:
            if "$store" in leaf:
                key, inner = leaf["$store"]
                self._kept[key] = read_tensor(block, inner).to(self._device, copy=True)
                return self._kept[key]
            if "$cached" in leaf:
                return self._kept[leaf["$cached"]]
            return views.setdefault(str(leaf), read_tensor(block, leaf))

        return unflatten(message.value, load)

    def clear(self) -> None:
        self._kept.clear()


def owned(value: Any, device: torch.device) -> Any:
    """Copy to a device what `TensorCache.unpack` returned: HunyuanDiT and SD3's context processor change the text in place.

    A tensor that comes several times stays one object.
    """
    copies: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device, copy=True)
        return copies[id(tensor)]

    return map_tensors(value, own)
