"""Calls of a model: what the owner of the model asks of the ranks, and how many of them take part in a call.

The latter asks `engine.policy`, tells it how long calls took, and puts its choice into words. The times are kept by devices and
driver, so that a new ComfyUI need not try again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..engine.measuring import device_driver
from ..engine.policy import CallSplit, CallWork, Known, Pool, Run, link_of, resized
from ..nested import tensors
from ..pool.config import RuntimeConfig
from ..pool.kept import LONGEST, KeptFile, remember
from ..pool.messages import CallReport, Load, Loaded
from ..pool.protocol import TensorPacker, decode
from ..pool.worker_pool import WorkerPool
from .placement import Demand, Shortages

LEFT_OUT = ("mask", "txt", "text", "llama", "t5", "clip", "embed", "num_tokens", "transformer_options")
"""Parts of the names of arguments whose shapes do not tell kinds of calls apart: text, whose length changes with every prompt and
hardly counts, and what ComfyUI notes, such as all sigmas of the run. So is `context`; `context_latents` and the like are tokens."""


def _counts(name: str) -> bool:
    rest = name.replace("context", "")
    return bool(rest) and ("latents" in rest or not any(part in rest for part in LEFT_OUT))


@dataclass(frozen=True)
class CallKind:
    """A key for calls that take the same time."""

    what: str  # model, method, and what else matters, in words
    shapes: tuple[tuple[Any, ...], ...]  # of the tensors among the arguments: (name of the argument, *sizes)

    @classmethod
    def of(cls, what: object, arguments: Mapping[str, Any]) -> CallKind:
        """Return the kind of a call with these arguments."""
        given = ((name, value) for name, value in sorted(arguments.items()) if _counts(name))
        return cls(repr(what), tuple((name, *tensor.shape) for name, value in given for tensor in tensors(value)))

    @property
    def name(self) -> str:
        """A digest, the same in every process."""
        return hashlib.sha256(f"{self.what}{self.shapes}".encode()).hexdigest()[:16]

    @property
    def elements(self) -> int:
        """Number of elements of all arguments together."""
        return sum(prod(shape[1:]) for shape in self.shapes)

    @property
    def of_any_size(self) -> tuple[object, ...]:
        """A key that calls share when they differ in their sizes alone: model and batch."""
        return self.what, *((shape[0], len(shape), *shape[1:2]) for shape in self.shapes)


class ModelState(Protocol):
    """A model as its owner has it, which the ranks' copies must equal."""

    @property
    def key(self) -> str:
        """Identifies recipe and file."""

    @property
    def patches_uuid(self) -> str:
        """Identifies its weight patches."""

    @property
    def demand(self) -> Demand:
        """The memory that it takes of the devices."""

    @property
    def path(self) -> str:
        """Its file."""

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        """Return the request to hold it, with the tensors of its weight patches. `device_bytes`: of weights on each rank's
        device."""

    def verify(self, request: Load, payload: Tensor, loaded: Sequence[Loaded], pids: Sequence[int]) -> None:
        """Compare it with what the ranks report, by rank. `payload`: the bytes of the request's tensors. Raises MirrorError: naming
        the rank, what differs and both values."""


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One call of a method of a model: of a transformer's innermost forward, or of a VAE's decode or encode."""

    method: str  # its name
    arguments: dict[str, Any]  # by name; plain data and tensors
    leading: tuple[str, ...]  # names of the first arguments, the latent and the timestep, which change with every call
    device: torch.device  # where the result goes
    in_place: tuple[str, ...]  # names of arguments that ranks leave in the memory of the message: each copies only its part
    encode_network: Callable[[nn.Module], Any]  # makes plain data and tensors of one of the networks
    mixes_batch: bool = False  # a patch of another node needs all items of the batch
    networks: Mapping[str, nn.Module] = field(default_factory=dict)  # that patches in the arguments refer to, by key
    memory_scale: float = 1.0  # how many times the memory that ComfyUI expects for its latent alone the call may need
    # What `torch.compile` is told about the model's blocks, in wire form; None = they are not compiled
    compile: dict[str, Any] | None = None
    sampling: bool = True  # it belongs to a sampling run; the calls of a VAE do not

    def kind(self, key: str) -> CallKind:
        """Return the kind of this call, for the model with this key."""
        return CallKind.of((key, self.method, self.mixes_batch, self.compile), self.arguments)


SLOW_CALL = 0.5  # seconds; a call that may be slower can be cancelled between blocks
CHECK_INTERVAL = 0.125  # seconds between two polls for Cancel on the ranks; they leave at the second one
KINDS = 64


class Pace:
    """Speed of the last call of every kind. The oldest of many kinds are forgotten."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}

    def note(self, kind: Hashable, ranks: int, seconds: float, modules: int) -> None:
        """Note that a call has ended. `ranks`: how many divided it. `modules`: planned modules that a rank passed."""
        remember(self._last, kind, (seconds * ranks, modules), KINDS)

    def modules(self, kind: Hashable) -> int:
        """Return how many planned modules a rank passed; 0 = not known."""
        return self._last.get(kind, (0.0, 0))[1]

    def modules_per_check(self, kind: Hashable, ranks: int) -> int:
        """Return how many planned modules `ranks` ranks may pass between two polls for Cancel; 0 = they need not poll."""
        if kind not in self._last:
            return 1
        work, modules = self._last[kind]
        return max(1, int(modules * CHECK_INTERVAL * ranks / work)) if work > SLOW_CALL * ranks else 0


@dataclass(frozen=True)
class Chosen:
    """The way a call runs."""

    kind: CallKind
    split: CallSplit | None  # the ranks that take part and their degrees; None = all ranks, the default
    # Prediction for a call that first runs on one device, which does not report its attentions
    expected: Known | None = None


class Chooser:
    """Chooses for the calls of one pool. `pool`: its ranks are ready. `shortages`: what ranks ran out of memory with, in this pool
    or one before."""

    def __init__(self, pool: WorkerPool, shortages: Shortages) -> None:
        self._pool, self._shortages = pool, shortages
        machine = (
            *pool.device_names,
            pool.backend,
            device_driver(),
            pool.peer_to_peer,
            pool.shares,
            *filter(None, pool.config.machines),
        )
        self._times = CallTimes(", ".join(map(str, machine)), pool.world_size)
        self._link = 1.0  # time of communication, as a multiple of the measured one
        self._last: dict[tuple[object, ...], tuple[int, Known]] = {}  # by model: elements of its last call, and what is known of it

    def choose(self, config: RuntimeConfig, kind: CallKind, sharded: bool, fits: Callable[[float], bool]) -> Chosen | None:
        """Return how a call is to run; None where the config leaves no choice. `sharded`: every rank keeps a part of the weights.
        `fits`: says whether the devices have the memory for this part of a call."""
        if not config.chooses_ranks:
            return None
        kind = replace(kind, what=repr((kind.what, sharded, config.sequence)))
        known, failed = self._times.get(kind.name), self._shortages.of(config.devices, kind.name)
        if known is None or not known.runs:
            return self._first(kind, self._ranks(config, sharded), fits(1.0) and not failed)
        known.failed = failed
        split = known.choose(self._ranks(config, sharded), fits)
        return Chosen(kind, None if split == known.default else split)

    def _first(self, kind: CallKind, pool: Pool, fits: bool) -> Chosen:
        """Return how to run an unknown call: on all ranks, or on one device if it fits there and should be faster, judging by
        another size of it."""
        elements, known = self._last.get(kind.of_any_size, (0, None))
        if known is not None and elements and fits:
            size = kind.elements / elements
            alone = CallSplit(tuple(range(pool.size)) if pool.all_take_part else (0,), 1, 1, 1)
            if known.predict(pool, alone, size) < known.predict(pool, known.default, size):
                return Chosen(kind, alone, Known(resized(known.work, size), known.default))
        return Chosen(kind, None)

    def note(self, config: RuntimeConfig, chosen: Chosen, reports: Sequence[CallReport], sharded: bool) -> dict[str, Any]:
        """Note that a call has ended. Returns the report's entry on the choice."""
        busy = [report for report in reports if not report.outcome.idle]
        seconds = [report.seconds - report.outcome.prelude for report in busy]
        inside = [report.communication.seconds for report in busy]
        compute = max(one - waited for one, waited in zip(seconds, inside, strict=True))
        run = Run(max(seconds), max(0.0, compute), min(inside))
        name = chosen.kind.name
        known = self._times.get(name)
        if known is None:
            known = self._times[name] = _known_by(reports, chosen.expected)
        split = chosen.split or known.default
        if known.note(split, run):
            self._link = link_of(known.work, self._ranks(config, sharded), split, known.runs[split]) or self._link
            self._times.save(name)
        self._last[chosen.kind.of_any_size] = chosen.kind.elements, known
        return self._described(known, split, self._ranks(config, sharded))

    def failed(self, chosen: Chosen) -> None:
        """Note that a call ran out of memory. If its split was chosen, it runs another way the next time."""
        if chosen.split is not None:
            self._shortages.note(self._pool.config.devices, chosen.kind.name, chosen.split)

    def _ranks(self, config: RuntimeConfig, sharded: bool) -> Pool:
        if self._pool.measured is None:
            raise RuntimeError("the ranks are not ready")
        return Pool(self._pool.measured, self._pool.shares, config.sequence, sharded, self._link)

    def _described(self, known: Known, split: CallSplit, pool: Pool) -> dict[str, Any]:
        """Return the ranks at work, and the best of the other numbers of ranks: all of them, or one."""
        own = known.runs[split].seconds
        told: dict[str, Any] = {"ranks": split.at_work, "of": pool.size, "seconds": own, "alternative": None}
        other = 1 if split.at_work == pool.size else pool.size
        best = known.alternative(pool, other)
        if best is not None and own > 0:
            seconds, measured = best
            told["alternative"] = {"ranks": other, "seconds": seconds, "measured": measured, "times": seconds / own}
            told["next"] = known.choose(pool, lambda part: True).at_work
        return told


def in_words(choice: Mapping[str, Any] | None) -> str:
    """Put a choice into words: "1 of 4 devices; 4 would take 1.30 times as long (predicted)". Empty without a choice.

    The measured time on one device is left to the speed of the run. A faster number of ranks is named only where it comes next.
    """
    if choice is None:
        return ""
    text, other = f"{choice['ranks']} of {choice['of']} devices", choice["alternative"]
    if other is None or (other["ranks"] == 1 and other["measured"]):
        return text
    how = "measured" if other["measured"] else "predicted"
    if other["times"] < 1:
        following = f"; the next call takes {other['ranks']} where memory allows: {other['times']:.2f} times as long ({how})"
        return text + following if choice["next"] == other["ranks"] else text
    return f"{text}; {other['ranks']} would take {other['times']:.2f} times as long ({how})"


def _known_by(reports: Sequence[CallReport], expected: Known | None) -> Known:
    """Return what the first call of a kind tells about it."""
    report, ranks = reports[0], tuple(range(len(reports)))
    if report.outcome.work is None:
        raise ValueError("a call for which nobody chooses ranks")
    sent, degrees = report.bytes.get("weights", 0), report.outcome.degrees
    work = replace(report.outcome.work, modules=report.modules, result=report.nbytes, weights=sent)
    if expected is not None:
        return replace(expected, work=replace(work, attentions=expected.work.attentions))
    default = CallSplit(ranks, degrees["batch"], degrees["ring"], degrees["ulysses"])
    if default.at_work != len(ranks):  # for example groups without an item: such a split tells nothing
        default = CallSplit(ranks, 1, 1, 1)
    return Known(work, default)


MOST_ATTENTIONS = 100  # kinds of attention in a call; an entry with more is not believed: a prediction goes through all
MOST_HEADS = 1 << 14  # of an attention; more are not believed: a prediction tries that many numbers
SHORTEST = 1e-6  # seconds of a call; less is not believed


class CallTimes(dict[str, Known]):
    """What is known of kinds of calls on one machine, by name.

    Args:
        machine: says in words what the times depend on: devices, driver, torch, backend, shares.
        world_size: number of ranks; what is kept of other ranks counts as absent.
        file: where they are kept, from the user's cache folder.
    """

    def __init__(self, machine: str, world_size: int, file: str | Path = "calls.json") -> None:
        self._machine, self._file = machine, KeptFile(file)
        super().__init__()
        for kind, entry in self._file.read(machine).items():
            with contextlib.suppress(ValueError):
                self[kind] = _known_of(entry, world_size)

    def save(self, kind: str) -> None:
        """Keep what is known of a kind of call on disk."""
        known = self[kind]
        runs = [[asdict(split), asdict(run)] for split, run in known.runs.items()]
        self._file.put(self._machine, kind, {"work": asdict(known.work), "default": asdict(known.default), "runs": runs})


def _known_of(entry: dict[str, Any], world_size: int) -> Known:
    """Decode an entry of the file. Raises ValueError: it is malformed, or for another number of ranks."""
    work, default = decode(CallWork, entry.get("work")), decode(CallSplit, entry.get("default"))
    runs = dict(decode(tuple[tuple[CallSplit, Run], ...], entry.get("runs")))
    everyone, sizes = tuple(range(world_size)), [size for shape, _ in work.attentions for size in vars(shape).values()]
    for split in (default, *runs):
        at_work = split.at_work  # 0 where a degree is
        if split.ranks[:1] != (0,) or not set(split.ranks) <= set(everyone) or tuple(sorted(set(split.ranks))) != split.ranks:
            raise ValueError(split)
        if not at_work or len(split.ranks) % at_work or split.batch > work.items:
            raise ValueError(split)
    if default.ranks != everyone or not work.items or not all(sizes) or len(work.attentions) > MOST_ATTENTIONS:
        raise ValueError(entry)
    if not all(SHORTEST <= run.seconds < LONGEST for run in runs.values()):
        raise ValueError(runs)
    if any(shape.heads > MOST_HEADS or shape.heads % shape.kv_heads for shape, _ in work.attentions):
        raise ValueError(work.attentions)
    # A single run on all ranks may have been slow by chance. It is predicted again once ranks have measured anew.
    return Known(work, default, {split: run for split, run in runs.items() if run.count or split != default})
