"""Comparison of every call's inputs, and of the weights, between ranks: by one small collective that no rank waits for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import in_place_changes, not_compiled, on_registration
from ..engine.ranks.collectives import RankGroup
from ..errors import PlanError
from ..nested import elements, has_elements, tensors
from ..recent import Recent
from . import agreement

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
REMEMBERED = 64  # inputs that come again, such as texts and positions
ITEMS = 64  # at most, of a batch
SAMPLE = 64  # elements of a weight that are compared
COUNTED = 32  # weights whose in-place changes are counted per call
PLAIN = (Tensor, nn.Parameter)
HALF = 1 << 63  # sums on the host wrap around as those on devices do


Posted = Callable[[], Collection[int]]
"""A comparison under way: waits for the numbers of all ranks."""


class Checksums:
    """Comparison of a module's calls between ranks, which all make the same ones.

    Args:
        module: of which the weights are compared, too.
        group: the ranks.
        always: compare everything before every call, and not only before the first one.
    """

    def __init__(self, module: nn.Module, group: RankGroup, *, always: bool) -> None:
        self._weights, self._group, self._always, self._is_first = Weights(module), group, always, True
        # Inputs -> their changes, and checksums.
        self._known: Recent[int, tuple[ref[Tensor], int, int | Tensor]] = Recent(REMEMBERED)

    def stop(self) -> None:
        self._weights.stop()

    @not_compiled
    def begin(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: PlanError | None = None
    ) -> Posted | None:
        """Compare a call before it runs, or start to. No rank waits for another one in the second case, nor for its device.

        Args:
            forward: the module's own.
            error: an error that keeps this rank from the call. Others learn of it where all is compared.

        Raises:
            PlanError: on all ranks alike, if they were given different inputs or one has an error.
        """
        if self._always or self._is_first:
            self._compare(forward, args, kwargs, error)
            return None
        # Times odd numbers, so that swapped tensors show, and so do swapped items in `checksum`.
        host, on_device = self._weights.number(), {}
        for place, each in enumerate(_comparable(args, kwargs)):
            made = self._sum(each)
            if isinstance(made, int):
                host += made * (2 * place + 1)
            else:
                on_device[2 * place + 1] = made
        return self._post((host + HALF) % (2 * HALF) - HALF, on_device)

    def _post(self, host: int, on_device: Mapping[int, Tensor]) -> Posted:
        """Send the sum of a number and of some on devices, by what each is multiplied with, to all ranks."""
        group, shared = self._group, None if on_device else self._group.shared
        if shared is not None:
            group.stats.counts["checks"] += 1
            return partial(shared.published, shared.publish(host))
        place = next((each.device for each in on_device.values()), group.device)
        own = torch.full((1,), host, device=place)
        if on_device:
            factors = _odd(tuple(on_device), place)
            own += (torch.stack([each.to(place) for each in on_device.values()]) * factors).sum()
        numbers = own.new_empty(group.size)
        pending = group.gather_parts(own, numbers, "checks")
        if own.is_cpu or group.via_host:
            return partial(_read, pending.wait, numbers)
        # Not read on the device: that would wait for all of the call.
        pending.wait()
        arrived = torch.get_device_module(place).Event()
        numbers = numbers.to("cpu", non_blocking=True)
        arrived.record()
        return partial(_read, arrived.synchronize, numbers)

    @not_compiled
    def end(self, posted: Posted | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare a call after it has run. Raises PlanError, on all ranks alike, if they were given different inputs."""
        self._is_first = False
        if posted is None or len(set(posted())) == 1:
            return
        # torch counts no change where others write, such as its collectives: what was remembered may be old on some ranks.
        known, self._known = self._known, Recent(REMEMBERED)
        self._weights.forget()
        self._compare(forward, args, kwargs)
        if any(id(each) in known and known[id(each)][1] != in_place_changes(each) for each in _comparable(args, kwargs)):
            raise PlanError("The ranks of this call were given different inputs, which it has changed since.")

    def _compare(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: PlanError | None = None
    ) -> None:
        name = type(self._weights.module).__name__
        agreement.check_inputs(name, forward, self._group, args, kwargs, error, self._weights.number())

    def _sum(self, tensor: Tensor) -> int | Tensor:
        """Return the checksum of a tensor, on its device, or a number: that of an earlier call, if it has not changed since."""
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
        self._counted: list[tuple[Sequence[Tensor], list[int]]] = [([], [])]  # some weights, and their changes
        self._at, self._number = 0, 0
        self.stop = on_registration(self, Weights.forget)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def forget(self, *_: object) -> None:
        """Have the number made again."""
        self._is_stale = True

    def number(self) -> int:
        """Return the number, made again if a weight has changed: some are looked at in each call, by turns."""
        some, changes = self._counted[self._at]
        self._at = (self._at + 1) % len(self._counted)
        if self._is_stale or [*map(_changes_of, some)] != changes:
            module = self.module
            self._is_stale, self._at = False, 0
            own = list(module.parameters()) if module is not None else []
            own = [each for each in own if type(each) in PLAIN and not each.is_inference()]
            chunks = [own[at : at + COUNTED] for at in range(0, max(len(own), 1), COUNTED)]
            self._counted = [(chunk, [*map(_changes_of, chunk)]) for chunk in chunks]
            self._number = zlib.crc32(repr([*_described(module)] if module is not None else ()).encode())
        return self._number


_changes_of = attrgetter("_version")


def _comparable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of a call that hold numbers one by one."""
    for value in (*args, *kwargs.values()):
        for each in (value,) if isinstance(value, Tensor) else tensors(value):
            if type(each) in PLAIN and has_elements(each):
                yield each


def _read(wait: Callable[[], object], numbers: Tensor) -> Collection[int]:
    wait()
    return numbers.tolist()


def _described(module: nn.Module) -> Iterator[object]:
    """Yield what is the same on all ranks: names and classes of parts, weights, and checksums of some of their elements."""
    for name, part in module.named_modules():
        yield name, type(part).__qualname__
    sums: dict[torch.device, dict[str, int | Tensor]] = {}  # by device, to wait for each once
    for name, weight in module.named_parameters():
        yield name, type(weight).__qualname__, tuple(weight.shape), weight.dtype
        if type(weight) in PLAIN and has_elements(weight) and weight.numel():
            sums.setdefault(weight.device, {})[name] = checksum(weight.detach().reshape(-1)[:SAMPLE])
    # Offloaded weights may be on other devices of other ranks.
    numbers = [torch.stack([*map(torch.as_tensor, some.values())]).tolist() for some in sums.values()]
    yield sorted(pair for some, of_some in zip(sums.values(), numbers, strict=True) for pair in zip(some, of_some, strict=True))


@lru_cache(64)
def _odd(factors: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(factors, device=device)


def checksum(tensor: Tensor) -> int | Tensor:
    """Return the sum of a tensor's elements, taken as integers: the same in any order of adding, in any memory, on any device.

    Those of the n-th of some items count 2 n + 1 times. It is a number for tensors of the CPU.
    """
    data = elements(tensor)
    bits = data.view(INTEGERS[data.element_size()])
    if bits.is_cpu and bits.numel() == 1:
        return int(bits)
    # In 64 bits: modulo 2^32 a tensor of a power of two of elements has the sum of its negative, of its double and of its half.
    if not bits.ndim or not 1 < len(bits) <= ITEMS:
        made = bits.sum()
        return int(made) if bits.is_cpu else made
    sums = bits.flatten(1).sum(1) if bits.ndim > 1 else bits.long()
    if bits.is_cpu:
        return sum(int(each) * (2 * item + 1) for item, each in enumerate(sums.tolist()))
    return (sums * _odd(tuple(range(1, 2 * len(bits), 2)), bits.device)).sum()
