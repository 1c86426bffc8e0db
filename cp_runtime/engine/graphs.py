"""Forwards recorded as CUDA graphs: one launch by the host instead of hundreds.

A recording holds the whole forward of one rank, including NCCL's collectives. It belongs to one *form*: the shapes, dtypes and
plain values of the arguments. A replay first copies the arguments' tensors into the recorded inputs.

| Call of a form | Work of the ranks |
|---|---|
| first | compute as usual |
| second | the same, then record; recording computes and sends nothing |
| third | compute, then replay the same; where that differs, compute again: two computations may differ as well |
| later | replay |

Before each call the ranks agree on the least that one of them can do, since a replay, a recording and a plain call must meet their
like on the other ranks. So any rank may forget its recordings at any time: when weights move, or memory is needed. An error while
recording, or a difference, ends recording for the model: this rank never records again, and all ranks compute. So does a
floating-point tensor that the model keeps between calls, beside its weights: a replay would not notice a replacement.

The time that a replay waits for other ranks is not measured.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..compat import DispatchMode, buffer_slots, keep_number, memory_number, parameter_slots, recorded
from ..nested import map_tensors, stored, tensors
from .ranks.collectives import CommStats, RankGroup, wait_for

log = logging.getLogger("context_parallel.worker")

SEEN, RECORDINGS = 16, 4  # forms to remember, and forms with a recording
NOISE = 2.0  # a replay may differ by this multiple of the difference between two calls
NEVER, NEW, KNOWN, RECORDED, CHECKED = range(5)  # levels of a form on a rank
REPLAYED = "replayed"
FIRST = "the first calls of a size are computed, recorded and compared"
About = TypeVar("About")
Run = Callable[[Any], tuple[Any, About]]
"""A forward: arguments -> (output, further information about the call)."""


class Reads(DispatchMode):
    """While active, records in `outside` the device tensors that operations read and none of them made, one of each memory."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self._made: dict[int, object] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory_number(part): part for tensor in tensors([args, kwargs or {}]) for part in stored(tensor)}
        for number, tensor in given.items():
            if tensor.device.type != "cpu" and number not in self._made:
                self.outside.setdefault(number, tensor)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            for part in stored(tensor):
                if memory_number(part) not in given:
                    self._made[memory_number(part)] = keep_number(part)
        return out


@dataclass
class Recording(Generic[About]):
    """A recorded forward.

    Args:
        inputs, out: tensors that it reads and writes.
        kept: other tensors that it reads, beside weights.
        about: further information from the forward.
        counts, nbytes: of the collectives in it, by kind.
        checked: a replay has given the forward's result.
    """

    graph: Any
    inputs: list[Tensor]
    out: Any
    kept: list[Tensor]
    about: About
    counts: Counter[str]
    nbytes: Counter[str]
    checked: bool = False

    def replay(self, arguments: Any, stats: CommStats) -> Any:
        """Replay it with other arguments of the same form; return a copy of the output."""
        for target, source in zip(self.inputs, tensors(arguments), strict=True):
            target.copy_(source)
        self.graph.replay()
        stats.counts += self.counts
        stats.bytes += self.nbytes
        return map_tensors(self.out, Tensor.clone)


class Graphs(Generic[About]):
    """The recorded forwards of one model on one rank.

    Attributes:
        refused: why there are none any more; empty = recording is possible.
        told: outcome of the last call: REPLAYED, or why it was not.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.refused = self.told = ""
        self._device = device
        own = [(slots, name) for m in model.modules() for slots in (parameter_slots(m), buffer_slots(m)) for name in slots]
        self._slots: list[tuple[dict[str, Any], str]] = own
        self._addresses: list[int] = []
        self._seen: deque[object] = deque(maxlen=SEEN)
        self._recordings: dict[object, Recording[About]] = {}
        self._pool: Any = None
        self._stream: Any = None

    def call(
        self, key: object, arguments: Any, own: Callable[[Any], Any], run: Run[About], ranks: RankGroup, needed: float
    ) -> tuple[Any, About]:
        """Run a forward, or replay it. All of `ranks` call this alike.

        Args:
            key: everything beside the arguments that decides the path of the forward.
            own: makes device tensors from the arguments, which the forward may modify.
            needed: bytes that the forward may take.
        """
        if self._recordings and self._addresses != self._found():
            self.drop()
        form = key, form_of(arguments)
        can = -int(ranks.largest(torch.tensor([-self._can(form)], device=ranks.device)).item())
        why = FIRST
        try:
            if can == CHECKED:
                self._recordings[form] = recording = self._recordings.pop(form)  # the last one used
                self.told = REPLAYED
                return recording.replay(arguments, ranks.stats), recording.about
            out, about = run(own(arguments))
            if can == RECORDED:
                self._check(self._recordings[form], out, arguments, own, run, ranks)
            elif can == KNOWN:
                self._forget(form)
                why = self._record(form, own(arguments), run, ranks.stats, needed) or why
            elif can == NEW:
                self._seen.append(form)
            else:
                self.drop()
                why = "another rank cannot"
        except BaseException:
            self.drop()  # memory may have run out because of them
            raise
        self.told = self.refused or why
        return out, about

    def drop(self, needed: float = math.inf) -> None:
        """Forget all recordings and free their memory, unless `needed` bytes are free beside it."""
        if not self._recordings or torch.cuda.mem_get_info(self._device)[0] >= needed:
            return
        for form in list(self._recordings):
            self._forget(form)
        torch.cuda.empty_cache()

    def _forget(self, form: object) -> None:
        recording = self._recordings.pop(form, None)
        if recording is not None:
            recording.graph.reset()

    def _can(self, form: object) -> int:
        if self.refused:
            return NEVER
        recording = self._recordings.get(form)
        if recording is not None:
            return CHECKED if recording.checked else RECORDED
        return KNOWN if form in self._seen else NEW

    def _weights(self) -> Iterator[Tensor]:
        """Yield the weights, as plain tensors."""
        weights = (slots.get(name) for slots, name in self._slots)
        return (part for w in weights if w is not None for part in ((w,) if type(w) is Parameter else stored(w)))

    def _found(self) -> list[int]:
        return [part.data_ptr() for part in self._weights()]

    def _record(self, form: object, inputs: Any, run: Run[About], stats: CommStats, needed: float) -> str:
        """Record a forward, which has just run with such arguments. Return why that was impossible this time, else ""."""
        if any(part.device.type == "cpu" for part in self._weights()):
            return "some weights are in the computer's memory"
        while len(self._recordings) >= RECORDINGS:
            self._forget(next(iter(self._recordings)))
        wait_for(self._device)
        torch.cuda.empty_cache()  # a recording has private memory
        if torch.cuda.mem_get_info(self._device)[0] < 2 * needed:  # calls of other forms need as much again
            return "the device has too little memory for a recording"
        if not self._recordings:
            self._pool, self._addresses = torch.cuda.graph_pool_handle(), self._found()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        graph, given = torch.cuda.CUDAGraph(), list(tensors(inputs))
        try:
            with stats.recording() as sent, recorded(graph, self._pool, self._stream), Reads() as reads:
                out, about = run(inputs)
        except Exception as error:  # noqa: BLE001  (whatever it is, the model runs without)
            self._refuse(f"recording failed: {_first_line(error)}")
            return ""
        known = set(map(memory_number, [*given, *self._weights()]))
        kept = [tensor for number, tensor in reads.outside.items() if number not in known]
        if strange := [tensor for tensor in kept if tensor.is_floating_point()]:  # others are positions
            graph.reset()
            self._refuse(f"the model reads {len(strange)} tensors that it keeps from call to call")
        else:
            self._recordings[form] = Recording(graph, given, out, kept, about, *sent)
        return ""

    def _check(
        self, recording: Recording[About], out: Any, arguments: Any, own: Callable[[Any], Any], run: Run[About], ranks: RankGroup
    ) -> None:
        """Compare a replay with the forward's result, on arguments new to the recording. All ranks come here."""
        differs = _difference(recording.replay(arguments, ranks.stats), out)
        if ranks.largest(torch.tensor([float(differs != 0)], device=ranks.device)).item():
            noise = _difference(run(own(arguments))[0], out)
            if differs and not differs <= NOISE * noise:  # NaN is a difference
                self._refuse(f"a replay differs by {differs:.2g}, two calls by {noise:.2g}")
                return
        recording.checked = True

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.drop()
        log.warning("CUDA graphs: this model is computed without: %s", why)


def form_of(value: Any) -> object:
    """Return a key of everything in arguments but the numbers in their tensors. Values of unknown types equal nothing."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(form_of, value))
    if isinstance(value, dict):
        return tuple((name, form_of(item)) for name, item in value.items())
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    return (type(value), value) if plain else object()


def _difference(out: Any, expected: Any) -> float:
    pairs = zip(tensors(out), tensors(expected), strict=True)
    return max((0.0 if torch.equal(a, b) else (a.double() - b.double()).abs().max().item() for a, b in pairs), default=0.0)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
