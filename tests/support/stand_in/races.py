"""Races between streams, found by torch's own sanitizer (`torch.cuda._sanitizer`).

Numbers are right whatever the streams do, because the CPU computes in the order of the program. So the sanitizer is told what every
kernel reads and writes, on which stream, and what waits for what. Two accesses of the same bytes, one of which writes, that nothing
puts in order raise `Race` with both places. Memory that is freed goes to the next tensor that is made for the same stream.
"""

import bisect
import functools
import itertools
import os
import re
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.cuda._sanitizer
from torch import Tensor

HERE = os.path.dirname(__file__) + os.sep
FACTORY = re.compile(r".*::(new_.*|.*_like)(\..*)?$")
DEPTH = 6  # callers that a report names

sanitizer: Any = torch.cuda._sanitizer
_handler = sanitizer.EventHandler()
_bounds: dict[int, list[int]] = {}
"""Of every memory that kernels used, by its address: where ranges begin that were used apart from each other, and its end."""
_given_back: defaultdict[int, list[Any]] = defaultdict(list)
"""By stream: what would be a race if a tensor were made for it now."""
_lock = threading.RLock()
_numbers = itertools.count(1)


class Race(RuntimeError):
    """Two accesses that nothing puts in order."""


class Place(list[tuple[str, int, str, None]]):
    """What the sanitizer keeps of a stack: callers outside of torch, the last one at the end."""

    def format(self) -> list[str]:
        return traceback.format_list(self)


@functools.cache
def _is_outside(file: str) -> bool:
    return not file.startswith(HERE) and "/torch/" not in file


def callers() -> Iterator[Any]:
    """Frames of who called torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _is_outside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place(*_: Any, **__: Any) -> Place:
    return Place(
        (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None) for frame in itertools.islice(callers(), DEPTH)
    )


# Its own stacks look at every file on the way, for every kernel.
sanitizer.traceback = SimpleNamespace(walk_stack=lambda _: None, StackSummary=SimpleNamespace(extract=place))


def kernel(func: Any, args: Any, kwargs: Any, made: Iterable[Tensor], streams: list[int]) -> None:
    """Note an operation of torch on a stream; on two, where it copies from one card to another.

    Args:
        made: the numbers of its results on cards.

    Raises:
        Race: with an access before it.
    """
    writing, views, makes = _schema(func)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        for tensor in flat(value):
            if (numbers := getattr(tensor, "numbers", None)) is not None:
                (writes if name in writing else reads).append(numbers)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
    fresh = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
    if views and not fresh and not writing:
        return
    for one, other in itertools.permutations(streams, 2):
        wait_stream(one, other)
    if fresh and streams[0] in _given_back:
        _reuse(streams[0])
    touch(streams[0], _name(func), () if makes else reads, (*writes, *fresh))
    for other in streams[1:]:
        wait_stream(other, streams[0])


def touch(stream: int, operator: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Note what is read and written on a stream, by the numbers on the CPU."""
    with _lock:
        written = {cell for tensor in writes for cell in _cells(tensor)}
        read = {cell for tensor in reads for cell in _cells(tensor)} - written
        known = _handler.tensors_accessed.accesses
        for cell in read:  # of one stream the last read is enough
            if (info := known.get(cell)) and info.reads:
                info.reads = [each for each in info.reads if each.stream != stream]
        errors = _handler._handle_kernel_launch(stream, read, written, set(), operator, defaultdict(list))
    if errors:
        raise Race(str(errors[0]))


def freed(address: int, stream: int, recorded: set[int]) -> None:
    """Memory that was made for a stream is free for the next tensor made there. `recorded` are streams that it was told of."""
    with _lock:
        for cell in _bounds.pop(address, [0])[:-1]:
            if info := _handler.tensors_accessed.accesses.pop(cell, None):
                used = [each for each in (*info.reads, info.write) if each and each.stream not in {stream, *recorded}]
                if not used:
                    continue
                freed_at = Place(reversed(place()))
                now = sanitizer.Access(sanitizer.AccessType.WRITE, 0, stream, "what gets the freed memory", [], False, freed_at)
                _given_back[stream] += [sanitizer.UnsynchronizedAccessError(cell, None, now, before) for before in used]


def forget(address: int) -> None:
    """Nobody gets this memory by way of torch."""
    with _lock:
        for cell in _bounds.pop(address, [0])[:-1]:
            _handler.tensors_accessed.accesses.pop(cell, None)


def _reuse(stream: int) -> None:
    """A tensor is made for a stream, in memory that others there have given back."""
    with _lock:
        for race in _given_back.pop(stream, ()):
            if not _handler.syncs.is_ordered_after(stream, race.previous_access.seq_num, race.previous_access.stream):
                raise Race(str(race))


def new_number() -> int:
    """Of a stream or an event."""
    return next(_numbers)


def wait_stream(stream: int, other: int) -> None:
    """The first does nothing more before the second has done what it was given."""
    with _lock:
        syncs = _handler.syncs
        for each in (stream, other):
            syncs._ensure_stream_exists(each)
        syncs._state_wait_for_other(syncs.current_sync_states[stream], syncs.current_sync_states[other])


def told(what: str, *numbers: int) -> None:
    """Tell the sanitizer of an event or a stream, by the name of its handler's method."""
    with _lock:
        getattr(_handler, f"_handle_{what}")(*numbers)


_name = functools.cache(str)


@functools.cache
def _schema(func: Any) -> tuple[set[int | str], bool, bool]:
    """Arguments that an operation writes, by place and name; whether its results may be views; whether it only makes memory."""
    writing: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writing |= {place, argument.name}
    views = any(result.alias_info is not None for result in func._schema.returns)
    return writing, views, FACTORY.match(func.name()) is not None


def flat(value: Any) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))


def _cells(tensor: Tensor) -> list[int]:
    """Ranges, by their first addresses, that make up the bytes from the first number of a tensor to its last."""
    if not tensor.numel():
        return []
    storage = tensor.untyped_storage()
    base, start = storage.data_ptr(), tensor.data_ptr()
    end = start + tensor.itemsize * (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
    bounds = _bounds.setdefault(base, [base, base + storage.nbytes()])
    for at in (start, end):
        place = bisect.bisect_left(bounds, at)
        if place == len(bounds) or bounds[place] != at:
            bounds.insert(place, at)
            if info := _handler.tensors_accessed.accesses.get(bounds[place - 1]):
                _handler.tensors_accessed.accesses[at] = sanitizer.TensorInfo(None, list(info.reads), info.write)
    return bounds[bisect.bisect_left(bounds, start) : bisect.bisect_left(bounds, end)]
