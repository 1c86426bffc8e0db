"""How many ranks the calls of a pool run on: asks `engine.policy`, tells it what calls took, and says in words what it chose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..engine.measuring import device_driver
from ..engine.policy import CallSplit, CallWork, Known, Pool, Run, link_of, resized
from ..nested import tensors
from ..pool.call_times import CallTimes
from ..pool.config import RuntimeConfig
from ..pool.messages import CallReport
from ..pool.worker_pool import WorkerPool
from .shortages import Shortages

LEFT_OUT = ("context", "mask", "txt", "text", "llama", "t5", "clip", "embed", "num_tokens", "transformer_options")
"""Parts of the names of arguments whose shapes do not tell kinds of calls apart: text, whose length changes with every prompt and
hardly counts, and what ComfyUI notes, such as all sigmas of the run."""

Sizes = tuple[tuple[object, ...], int]
"""(model and batch, elements of all arguments) of a kind of call."""


@dataclass(frozen=True)
class Chosen:
    """How a call runs.

    Args:
        kind: of the call.
        split: the ranks that take part and their degrees; None = all of them, as nobody chose otherwise.
        sizes: of the kind.
        expected: what the call should be, where it first runs on one device, which does not report its attentions.
    """

    kind: str
    split: CallSplit | None
    sizes: Sizes
    expected: Known | None = None


class Chooser:
    """Chooses for the calls of one pool.

    Args:
        pool: whose ranks are ready.
        shortages: what ranks ran out of memory with, in this pool or one before.
    """

    def __init__(self, pool: WorkerPool, shortages: Shortages) -> None:
        self._pool, self._shortages = pool, shortages
        self._times: CallTimes | None = None
        self._link = 1.0  # what communication takes over what was measured
        self._last: dict[tuple[object, ...], tuple[int, Known]] = {}  # the last size of every model, and what is known of it

    def choose(
        self,
        config: RuntimeConfig,
        kind: Sequence[object],
        arguments: Mapping[str, Any],
        shared: bool,
        fits: Callable[[float], bool],
    ) -> Chosen | None:
        """How a call is to run; None where the config leaves no choice.

        Args:
            kind: what else tells it from other calls, besides the shapes of its arguments.
            shared: every rank keeps a part of the weights.
            fits: whether the devices have the memory for this part of a call.
        """
        if not config.chooses_ranks:
            return None
        shapes = [(name, *t.shape) for name, value in sorted(arguments.items()) if not _is_left_out(name) for t in tensors(value)]
        model = repr((*kind, shared, config.sequence))
        name = hashlib.sha256(f"{model}{shapes}".encode()).hexdigest()[:16]
        sizes = (model, *((each[0], len(each), *each[1:2]) for each in shapes)), sum(prod(each[1:]) for each in shapes)
        known, failed = self.times.get(name), self._shortages.of(config.devices, name)
        if known is None or not known.runs:
            return self._first(name, sizes, self._ranks(config, shared), fits(1.0) and not failed)
        known.failed = failed
        split = known.choose(self._ranks(config, shared), fits)
        return Chosen(name, None if split == known.default else split, sizes)

    def _first(self, name: str, sizes: Sizes, pool: Pool, fits: bool) -> Chosen:
        """How a call runs of which nothing is known: on all ranks, or on one device if it fits there and that should be faster, as
        far as another size of it can tell."""
        size, known = self._last.get(sizes[0], (0, None))
        if known is not None and size and fits:
            alone = CallSplit(tuple(range(pool.size)) if pool.all_take_part else (0,), 1, 1, 1)
            on_one, on_all = (known.predict(pool, split, sizes[1] / size) for split in (alone, known.default))
            if on_one < on_all:
                return Chosen(name, alone, sizes, Known(resized(known.work, sizes[1] / size), known.default))
        return Chosen(name, None, sizes)

    def note(self, config: RuntimeConfig, chosen: Chosen, reports: Sequence[CallReport], shared: bool) -> dict[str, Any]:
        """A call has ended. Returns what the report says about the choice."""
        busy = [report for report in reports if not report.outcome.idle]
        seconds = [report.seconds - report.outcome.prelude for report in busy]
        inside = [report.communication.seconds for report in busy]
        compute = max(one - waited for one, waited in zip(seconds, inside, strict=True))
        run = Run(max(seconds), max(0.0, compute), min(inside))
        known = self.times.get(chosen.kind)
        if known is None:
            degrees = reports[0].outcome.degrees
            default = CallSplit(tuple(range(len(reports))), degrees["batch"], degrees["ring"], degrees["ulysses"])
            if default.at_work != len(reports):  # such as groups without an item: nothing could be told from it
                default = CallSplit(default.ranks, 1, 1, 1)
            known = Known(_work_of(reports[0]), default)
            if chosen.expected is not None:
                known = replace(chosen.expected, work=replace(known.work, attentions=chosen.expected.work.attentions))
            self.times.put(chosen.kind, known)
        split = chosen.split or known.default
        if known.note(split, run):
            self._link = link_of(known.work, self._ranks(config, shared), split, known.runs[split]) or self._link
            self.times.save(chosen.kind)
        self._last[chosen.sizes[0]] = chosen.sizes[1], known
        return self._described(known, split, self._ranks(config, shared))

    def failed(self, chosen: Chosen) -> None:
        """A call ran out of memory as it was to run. It runs otherwise the next time, unless nobody chose."""
        if chosen.split is not None:
            self._shortages.note(self._pool.config.devices, chosen.kind, chosen.split)

    @property
    def times(self) -> CallTimes:
        """Of this pool's machine."""
        if self._times is None:
            pool = self._pool
            machine = (*pool.device_names, pool.backend, device_driver(), pool.peer_to_peer, pool.shares)
            self._times = CallTimes(", ".join(map(str, machine)), pool.world_size)
        return self._times

    def _ranks(self, config: RuntimeConfig, shared: bool) -> Pool:
        if self._pool.measured is None:
            raise RuntimeError("the ranks are not ready")
        return Pool(self._pool.measured, self._pool.shares, config.sequence, shared, self._link)

    def _described(self, known: Known, split: CallSplit, pool: Pool) -> dict[str, Any]:
        """The ranks at work, and the best of the other numbers of ranks: all of them, or one."""
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
    """What a report says about a choice: "1 of 4 devices; 4 would take 1.30 times as long (predicted)". Empty without a choice.

    What one device was measured to take stands in the speed of the run. That others would be faster is said where they are next.
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


def _work_of(report: CallReport) -> CallWork:
    if report.outcome.work is None:
        raise ValueError("a call for which nobody chooses ranks")
    return CallWork(
        **vars(report.outcome.work), modules=report.modules, result=report.nbytes, weights=report.bytes.get("weights", 0)
    )


def _is_left_out(name: str) -> bool:
    return any(part in name for part in LEFT_OUT)
