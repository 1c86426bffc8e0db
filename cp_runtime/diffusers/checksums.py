"""Comparison of every call's inputs, and of the weights, between ranks: by one small collective that no rank waits for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import in_place_changes, not_compiled, on_registration
from ..engine.ranks.collectives import Pending, RankGroup
from ..errors import PlanError
from ..nested import tensors
from ..recent import Recent
from . import agreement

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
REMEMBERED = 64  # inputs that come again, such as texts and positions
SAMPLE = 64  # elements of a weight that are compared
COUNTED = 32  # weights whose in-place changes are counted per call
PLAIN = (Tensor, nn.Parameter)


class Posted(NamedTuple):
    """A comparison under way. `numbers`: of all ranks, in the host's memory after `arrived`, or after `pending` if that is None."""

    pending: Pending
    numbers: Tensor
    arrived: Any


class Checksums:
    """Comparison of a module's calls between ranks, which all make the same ones.

    Args:
        module: of which the weights are compared, too.
        group: the ranks.
        always: compare everything before every call, and not only before the first one.
    """

    def __init__(self, module: nn.Module, group: RankGroup, *, always: bool) -> None:
        self._weights, self._group, self._always, self._is_first = Weights(module), group, always, True
        self._known: Recent[int, tuple[ref[Tensor], int, Tensor]] = Recent(REMEMBERED)  # inputs -> their changes, and checksums

    def stop(self) -> None:
        self._weights.stop()

    @not_compiled
    def begin(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: PlanError | None = None
    ) -> Posted | None:
        """Compare a call before it runs, or start to. No rank waits for another one in the second case, nor for its device.

        Args:
            forward: the module's own.
            error: an error that keeps this rank from the call.

        Raises:
            PlanError: on all ranks alike, if they were given different inputs or one has an error.
        """
        if self._always or self._is_first:
            self._compare(forward, args, kwargs, error)
            return None
        if error is not None:
            raise error
        found = [each for value in (*args, *kwargs.values()) for each in ([value] if isinstance(value, Tensor) else tensors(value))]
        sums = [self._sum(each) for each in found if type(each) in PLAIN and not each.is_meta]
        place = sums[0].device if sums else self._group.device
        everything = [self._weights.number(place), *(each if each.device == place else each.to(place) for each in sums)]
        own, group = torch.stack(everything).sum(0, keepdim=True), self._group
        numbers = own.new_empty(group.size)
        pending = group.gather_parts(own, numbers, "checks")
        if own.is_cpu or group.via_host:
            return Posted(pending, numbers, None)
        # Not read on the device: that would wait for all of the call.
        pending.wait()
        arrived = torch.get_device_module(place).Event()
        numbers = numbers.to("cpu", non_blocking=True)
        arrived.record()
        return Posted(pending, numbers, arrived)

    @not_compiled
    def end(self, posted: Posted | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare a call after it has run. Raises PlanError, on all ranks alike, if they were given different inputs."""
        self._is_first = False
        if posted is None:
            return
        if posted.arrived is None:
            posted.pending.wait()
        else:
            posted.arrived.synchronize()
        if len(set(posted.numbers.tolist())) > 1:
            self._compare(forward, args, kwargs)
            raise PlanError("The ranks of this call were given different inputs, which it has changed since.")

    def _compare(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: PlanError | None = None
    ) -> None:
        weights = int(self._weights.number(torch.device("cpu")))
        name = type(self._weights.module).__name__
        agreement.check_inputs(name, forward, self._group, args, kwargs, error, weights)

    def _sum(self, tensor: Tensor) -> Tensor:
        """Return the checksum of a tensor, on its device: that of an earlier call, if it has not changed since."""
        known, changes = self._known.get(id(tensor)), in_place_changes(tensor)
        if known is not None and known[0]() is tensor and known[1] == changes:
            return known[2]
        made = checksum(tensor)
        if changes is not None:
            self._known[id(tensor)] = ref(tensor), changes, made
        return made


class Weights:
    """A number that is the same on ranks whose modules have the same parts and weights.

    It is made of names, classes, shapes and the first elements, and made again once torch counts a change: a part or weight put
    into a module, or, within some calls, a weight changed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self._is_stale = True
        self._counted: list[Tensor] = []
        self._changes: list[int] = []
        self._at, self._number = 0, torch.zeros((), dtype=torch.int64)
        self.stop = on_registration(self, Weights._note_change)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def _note_change(self, *_: object) -> None:
        self._is_stale = True

    def number(self, device: torch.device) -> Tensor:
        """Return the number, on a device."""
        some = slice(self._at, self._at + COUNTED)
        self._at = some.stop if some.stop < len(self._counted) else 0
        if self._is_stale or [*map(_changes_of, self._counted[some])] != self._changes[some]:
            module = self.module
            self._is_stale, self._at = False, 0
            own = list(module.parameters()) if module is not None else []
            self._counted = [each for each in own if type(each) in PLAIN and not each.is_inference()]
            self._changes = [*map(_changes_of, self._counted)]
            self._number = torch.tensor(zlib.crc32(repr([*_described(module)] if module is not None else ()).encode()))
        if self._number.device != device:
            self._number = self._number.to(device)
        return self._number


_changes_of = attrgetter("_version")


def _described(module: nn.Module) -> Iterator[object]:
    """Yield what is the same on all ranks: names and classes of parts, weights, and checksums of some of their elements."""
    for name, part in module.named_modules():
        yield name, type(part).__qualname__
    sums: dict[torch.device, dict[str, Tensor]] = {}  # by device, to wait for each once
    for name, weight in module.named_parameters():
        yield name, type(weight).__qualname__, tuple(weight.shape), weight.dtype
        if type(weight) in PLAIN and weight.numel() and not weight.is_meta:
            sums.setdefault(weight.device, {})[name] = checksum(weight.detach().reshape(-1)[:SAMPLE])
    # Offloaded weights may be on other devices of other ranks.
    yield sorted(pair for some in sums.values() for pair in zip(some, torch.stack([*some.values()]).tolist(), strict=True))


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, taken as integers: the same in any order of adding, in any memory, on any device."""
    data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return data.detach().view(INTEGERS[data.element_size()]).sum()
