"""Messages of NCCL: under way until somebody waits for them, and in one order on all ranks.

What is received holds `NOT_THERE` until then, which is NaN in every floating-point type; what is sent has to be the same then as it
was. Every group has a stream, on which its messages run behind what was given to the stream of the caller.
"""

from __future__ import annotations

import contextlib
import graphlib
import json
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import memory, races

NOT_THERE = 0xFF  # in every byte
EVEN = {"allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "reduce_"}
"""Operations to which all ranks bring as many bytes."""
PAIR = ("send", "recv_")
"""A message: one rank launches the first and the other one the second, in their own order among messages of these two."""
ROOTED = {"broadcast_": 2, "reduce_": 3}
"""Whose argument says which rank of the group writes, or reads, alone."""


class Launch(NamedTuple):
    """One kernel of NCCL, in the log.

    Attributes:
        group, members: name of the process group, and its ranks in the world.
        nbytes: of what it receives, or sends alone.
        peer: the other rank of a message.
        beside: groups of some of the same ranks whose messages were under way, with nothing that has NCCL launch both in one order.
    """

    group: str
    members: tuple[int, ...]
    operation: str
    nbytes: int
    peer: int | None = None
    beside: tuple[str, ...] = ()


Node = tuple[str, tuple[int, ...], int]
"""A launch of all ranks of a group, or a message from one to another: group, the two ranks or (), which one of them."""

log: list[Launch] = []
"""Of this rank, in the order of its program."""
files: Path | None = None
"""Where it is written, too, with the number of the process behind the name: that of the ledger."""
_streams: dict[str, int] = {}
_under_way: weakref.WeakSet[Work] = weakref.WeakSet()
_local = threading.local()


@dataclass
class _Message:
    """A tensor that is sent or received, as bytes on the CPU, and what stands in for it.

    Attributes:
        owner: keeps its memory.
    """

    owner: Any
    stand_in: Tensor

    @property
    def numbers(self) -> Tensor:
        return _as_bytes(self.owner.numbers)


class Work(dist.Work):
    """Messages under way."""

    def __init__(self, inner: Any, sent: list[_Message], received: list[_Message], launch: Launch, stream: int) -> None:
        super().__init__()
        self._inner, self._sent, self._received, self.launch, self._stream = inner, sent, received, launch, stream
        self._place = races.place()
        _under_way.add(self)

    def wait(self, timeout: Any = None) -> bool:
        """Hold the current stream until they have arrived, and the host, because gloo does."""
        if self._inner is not None:
            self._inner.wait() if timeout is None else self._inner.wait(timeout)
            self._inner = None  # it keeps their memory
        _under_way.discard(self)
        with _disable_current_modes():
            for message in self._sent:
                if not torch.equal(message.numbers, _as_bytes(message.stand_in)):
                    raise self._error("what was being sent was written to before its wait")
            for message in self._received:
                if not bool((message.numbers == NOT_THERE).all()):
                    raise self._error("where it was to arrive was written to before its wait")
                message.numbers.copy_(_as_bytes(message.stand_in))
        self._sent, self._received = [], []
        races.wait_stream(memory.LEDGER.module.current_stream().cuda_stream, self._stream)
        return True

    def is_completed(self) -> bool:
        return self._inner is None or bool(self._inner.is_completed())

    def _error(self, what: str) -> races.Race:
        return races.Race(
            f"{self.launch.operation} of group {self.launch.group}: {what}. Launched at\n{''.join(reversed(self._place.format()))}"
        )


def launch(func: Any, args: Any, kwargs: Any, group: Any) -> Any:
    """Begin to send and receive. Returns what torch's operation returns."""
    name = func._schema.name.partition("::")[2]
    sends, receives = _sides(name, args, group)
    stream = _streams.setdefault(group.group_name, races.new_number())
    caller = memory.LEDGER.module.current_stream().cuda_stream
    with (
        one(group, name, sum(tensor.nbytes for tensor in races.flat(args[0])), args[2] if name in PAIR else None) as noted,
        _disable_current_modes(),
        torch.inference_mode(False),
    ):
        stand_ins = {id(tensor): _as_bytes(tensor.numbers).clone() for tensor in (*sends, *receives)}
        for tensor in receives:
            _as_bytes(tensor.numbers).fill_(NOT_THERE)
        out = func(*_on_host(args, stand_ins), **{key: _on_host(value, stand_ins) for key, value in kwargs.items()})
    inner = out if isinstance(out, torch.ScriptObject) else out[-1]
    overwritten = {id(tensor) for tensor in sends if any(_overlap(tensor.numbers, other.numbers) for other in receives)}
    work = Work(
        dist.Work.unbox(inner),
        [_Message(tensor, stand_ins[id(tensor)]) for tensor in sends if id(tensor) not in overwritten],
        [_Message(tensor, stand_ins[id(tensor)]) for tensor in receives],
        noted, stream,
    )  # fmt: skip
    _local.last = work  # until torch has handed it to the caller
    races.wait_stream(stream, caller)
    races.touch(stream, f"NCCL's {name}", [t.numbers for t in sends], [t.numbers for t in receives])
    return work.boxed() if isinstance(out, torch.ScriptObject) else (args[0], work.boxed())


def _on_host(value: Any, stand_ins: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return stand_ins[id(value)].view(value.dtype).view(value.shape)
    return type(value)(_on_host(each, stand_ins) for each in value) if type(value) in (tuple, list) else value


@contextlib.contextmanager
def one(group: Any, operation: str, nbytes: int = 0, peer: int | None = None) -> Iterator[Launch]:
    """Log one launch; what is launched inside is a part of it. `peer`: its rank in the group."""
    outer: Launch | None = getattr(_local, "outer", None)
    if outer is not None:
        yield outer
        return
    members = tuple(dist.get_process_group_ranks(group))
    ordered = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1" and memory.LEDGER.backend == "nccl"
    others = () if ordered else [work.launch for work in _under_way if work.launch.group != group.group_name]
    beside = {other.group for other in others if len({*other.members} & {*members}) > 1}
    other = None if peer is None else members[peer]
    entry = Launch(group.group_name, members, operation, nbytes, other, tuple(sorted(beside)))
    log.append(entry)
    if files is not None:
        with files.with_name(f"{files.name}.{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    _local.outer = entry
    try:
        yield entry
    finally:
        _local.outer = None


def _sides(name: str, args: Any, group: Any) -> tuple[list[Any], list[Any]]:
    """What an operation sends and receives."""
    first, second = list(races.flat(args[0])), list(races.flat(args[1]))
    if name in ("send", "recv_"):
        return (first, []) if name == "send" else ([], first)
    if name in ROOTED:
        root = args[ROOTED[name]] == group.rank()
        return (first, []) if root == (name == "broadcast_") else (first if name == "reduce_" else [], first)
    return (second or first), first


def logged(ledger: Path, pid: int) -> list[Launch]:
    """What a process has launched whose cards have this ledger."""
    lines = ledger.with_name(f"{ledger.name}.{pid}").read_text().splitlines()
    return [
        Launch(name, tuple(members), what, size, peer, tuple(beside))
        for name, members, what, size, peer, beside in map(json.loads, lines)
    ]


def disagreement(logs: Sequence[Sequence[Launch]]) -> str:
    """Say where the ranks of a world differ in what they launched on a group, or launched it in orders that wait for each other: a
    rank's kernels run in the order of its launches, one at a time, and one that has begun waits for its counterparts.

    Args:
        logs: of every rank.
    """
    before: dict[Node, set[Node]] = {}
    known: dict[Node, tuple[str, int]] = {}
    ends: Counter[Node] = Counter()
    for rank, entries in enumerate(logs):
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        last: set[Node] = set()
        for entry in entries:
            way: tuple[int, ...] = ()
            what = entry.operation, entry.nbytes if entry.operation in EVEN else 0
            if entry.peer is not None:
                way = (rank, entry.peer) if entry.operation == "send" else (entry.peer, rank)
                what = "message", entry.nbytes
            node = entry.group, way, counts[entry.group, way]
            counts[entry.group, way] += 1
            ends[node] += 1
            if known.setdefault(node, what) != what:
                return f"{_named(node)}: {known[node]} on one rank, {what} on another"
            before.setdefault(node, set()).update(last)
            last = {node}
    for node, count in ends.items():
        if node[1] and count == 1:
            return f"{_named(node)}: on one of the two ranks only"
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        return f"ranks launch in orders that wait for each other: {[*map(_named, error.args[1])]}"
    return ""


def _named(node: Node) -> str:
    group, way, number = node
    return f"message {number} of group {group} from {way[0]} to {way[1]}" if way else f"launch {number} of group {group}"


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, whatever mode it was made in."""
    with torch.inference_mode(False), torch.no_grad():
        start = tensor.storage_offset() * tensor.itemsize
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
