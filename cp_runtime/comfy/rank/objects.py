"""Reads values that the parent of this process has written: see `shared.objects`. They come over this rank's own channel."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pickle import Unpickler
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..shared.made import MAKERS, new_module, own_device
from ..shared.values import Facts, Place
from .files import Memory


class Read(NamedTuple):
    """What was written, here. `classes`: of its modules, as `Written` has them."""

    thing: Any
    classes: frozenset[type]


def read(
    data: bytes, tensors: Sequence[Tensor], device: torch.device, referred: Callable[[tuple[Any, ...]], Any] | None = None
) -> Read:
    """Read a thing that the parent of this process has written.

    Args:
        device: for what was on a device of its own there.
        referred: returns what this process has for a reference of `shared.objects.Settings.refer`.
    """
    reader = _Reader(io.BytesIO(data), tensors, device, referred)
    return Read(reader.load(), frozenset(reader.classes))


def read_leaves(leaves: Sequence[Tensor], device: torch.device, referred: Callable[[tuple[Any, ...]], Any] | None = None) -> Any:
    """Read `shared.objects.Written.leaves`, in host memory. What is read keeps that."""
    return read(leaves[0].numpy().tobytes(), leaves[1:], device, referred).thing


class _Reader(Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], device: torch.device, referred: Any) -> None:
        super().__init__(file)
        self._tensors, self._device_there, self._referred = tensors, device, referred
        self.classes: set[type] = set()

    def persistent_load(self, token: Any) -> Any:
        return self._tensors[token] if type(token) is int else self._referred(token)

    def find_class(self, module: str, name: str) -> Any:
        if name == own_device.__name__:
            return lambda kind: torch.device("cpu") if kind == "cpu" else self._device_there
        if name == new_module.__name__:
            return self._new
        return MAKERS.get(name) or super().find_class(module, name)

    def _new(self, cls: Any) -> nn.Module:
        self.classes.add(cls)
        return new_module(cls)


class Model(NamedTuple):
    """A model by value, here.

    Args:
        network: its transformer, or a VAE.
        kind: class of its patcher.
        settings: of that class, by name.
        classes: of its modules.
    """

    network: nn.Module
    kind: Any
    settings: Mapping[str, Any]
    facts: Facts
    classes: frozenset[type]


def read_model(value: bytes, memory: Memory, device: torch.device) -> Model:
    """Read the result of `shared.values.packed`.

    Args:
        memory: that the places are in.
        device: for tensors that were on a device in the parent.
    """
    head, _, data = value.partition(b"\n")
    places = [Place(*given) for given in json.loads(head)]
    (network, kind, settings, facts), classes = read(data, [_tensor(memory, place, device) for place in places], device)
    return Model(network, kind, settings, Facts(*facts), classes)


def _tensor(memory: Memory, place: Place, device: torch.device) -> Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    if place.nbytes:
        buffer, offset = memory.at(place.start)
        numbers = torch.frombuffer(buffer, dtype=torch.uint8, count=place.nbytes, offset=offset)
        made = numbers.view(dtype).as_strided(place.shape, place.stride)
    else:
        made = torch.empty(place.shape, dtype=dtype)
    return made if place.device == "cpu" else made.to(device)
