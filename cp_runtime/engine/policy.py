"""Choice of the number of ranks for a call and of how they share it: a prediction, and a choice among measurements.

A call is split into `batch` groups of `ring` x `ulysses` ranks (`CallSplit`). What it takes is predicted from one run of it on some
split s0 (`Run`), the rates that the ranks measured when they started, and the cost of its attentions (`cost`):

    compute(s) = W load(s) + F + a attention(s)
    seconds(s) = compute(s) + k (communication(s) + gathers(s) + weights(compute(s)))

| term | where it comes from |
|---|---|
| `load(s)` | part of the tokens and items that the slowest rank has, over its speed: 1 for one rank of mean speed |
| `attention`, `communication` | the cost model, of the slowest group; one on one machine of several has the link inside it |
| `gathers` | the output, once per call: `latency + bytes / bandwidth` |
| `weights` | where every rank keeps a part of them, once per call: `max(0, bytes / bandwidth - overlap compute(s))` |
| `F` | what fewer tokens do not lessen: `launch` x `LAUNCHES` per planned module, but no more than s0 took beyond matrix products |
| `W` | what else s0 computed, over load(s0) |
| `a` | 1, or less where s0 computed for a shorter time than its attentions should have taken |
| `k` | time of communication in s0 over the predicted one: the link as this call uses it; if s0 is one rank, as other calls did |

Whoever chooses has the same numbers for all ranks, so that nobody has to ask: the owner of a pool does it, and tells every rank
with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from math import log2

from .config import SequenceSettings
from .cost import AttentionShape, allowed, cost
from .measuring import Measured
from .mesh import factors, form_groups, reduced
from .sharding import Shares, split_sizes

LAUNCHES = 30  # operations per planned module
TRIES = 4  # splits of one kind of call that are measured
NEARLY = 1.25  # times the best time so far: a split is tried if its prediction is below this
HOPELESS = 2.0  # times the best: a split that took longer gets no second, warm run
WARM_UP = 2.0  # seconds at most for the connections that a first run makes
DRIFT = 1.05  # a time that is not reached again grows by this factor with every call: machines change
LINK = 0.2  # least factor by which a run corrects the link


@dataclass(frozen=True)
class CallSplit:
    """The ranks that compute a call, and how they share it."""

    ranks: tuple[int, ...]  # that take part, ascending, rank 0 among them. The others idle.
    # batch, ring, ulysses: degrees. Where their product is less than the ranks, several groups compute the same: that is for
    # weights that every rank keeps a part of, so that all must take part.
    batch: int
    ring: int
    ulysses: int

    @property
    def sequence(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def groups(self) -> int:
        """Groups that compute, including those that compute the same."""
        return len(self.ranks) // self.sequence

    @property
    def at_work(self) -> int:
        """Ranks whose work no other rank repeats."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class CallWork:
    """The work of a call, independent of who computes it."""

    items: int  # of the batch that groups can share out; 1 = none can
    sequence: bool  # whether ranks can share a sequence
    # Shapes of shared attentions, over the whole sequence, for one item, and the count of each
    attentions: tuple[tuple[AttentionShape, int], ...]
    operations: float  # of matrix products, of one item
    modules: int = 0  # planned ones
    result: int = 0  # bytes of the output
    weights: int = 0  # bytes that every rank sends of its part of the weights, where each keeps one


@dataclass(frozen=True)
class Run:
    """Times of a call on a split."""

    seconds: float  # until the last rank was done
    compute: float  # of the rank that computed longest
    communication: float  # of the rank that waited least: without waiting for late ranks
    count: int = 1  # runs behind these times; 0 = only the first, which warms up

    @property
    def warm(self) -> Run:
        """The same run without the time for making connections, at best."""
        if self.count:
            return self
        spared = min(WARM_UP, self.communication)
        return replace(self, seconds=self.seconds - spared, communication=self.communication - spared)


@dataclass(frozen=True)
class Pool:
    """The ranks that may compute a call."""

    measured: Measured  # of all ranks
    shares: Shares  # of all ranks
    settings: SequenceSettings  # of the sequence axes; its degrees are open
    all_take_part: bool = False  # every rank keeps a part of the weights
    # Time of communication as a multiple of the measured one, from other calls; for calls that have no such figure of their own
    link: float = 1.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.measured.each)

    def fastest(self, count: int) -> tuple[int, ...]:
        """Return rank 0, which hands over the result, and the fastest others; of equal ones, those with the better link to it."""
        links = {pair[1]: round(log2(link[1])) for pair, link in self.measured.pairs if pair[0] == 0}
        others = sorted(range(1, self.size), key=lambda rank: (-self.weight(rank), -links.get(rank, 0), rank))
        return tuple(sorted((0, *others[: count - 1])))

    def weight(self, rank: int) -> int:
        """Return the share of a rank."""
        return self.shares[rank] if self.shares else 1

    def speed(self, rank: int) -> float:
        """Return the speed of a rank relative to the mean rank."""
        return self.weight(rank) * self.size / (sum(self.shares) or self.size)

    def shares_of(self, ranks: Sequence[int]) -> Shares:
        """Return the shares of some ranks."""
        return reduced(tuple(self.weight(rank) for rank in ranks))


@dataclass
class Known:
    """The work and the runs of one kind of call."""

    work: CallWork  # of the call
    default: CallSplit  # the split that it runs on without a choice
    runs: dict[CallSplit, Run] = field(default_factory=dict)  # by split
    # Splits that ran out of memory; they are not chosen
    failed: Set[CallSplit] = field(default=frozenset(), compare=False)
    _predictions: tuple[object, list[tuple[float, CallSplit]]] = field(default=(None, []), compare=False, repr=False)

    def note(self, split: CallSplit, run: Run) -> bool:
        """Note that a run has ended. Returns whether it is worth keeping on disk: a new split, or the second run of one."""
        old = self.runs.get(split)
        if old is not None and old.count and run.seconds > old.seconds * DRIFT:
            run = replace(old, seconds=old.seconds * DRIFT)
        self.runs[split] = replace(run, count=0 if old is None else old.count + 1)
        return old is None or old.count == 0

    def choose(self, pool: Pool, fits: Callable[[float], bool]) -> CallSplit:
        """Return the split for the next run. `fits`: says whether the devices have the memory for this part of a call."""
        runs = {split: run for split, run in self.runs.items() if split not in self.failed}
        if not runs:
            return self.default
        best = min(runs, key=lambda split: runs[split].seconds)
        shortest, warm = runs[best].seconds, runs[best].warm.seconds

        def untried(limit: float) -> Iterator[CallSplit]:
            """Yield splits that should take less than `limit` seconds, the shortest first."""
            for seconds, other in self.predictions(pool):
                if seconds >= limit:
                    return
                if fits(largest_part(self.work, pool, other)):
                    yield other

        alone = (split for split in untried(warm / HOPELESS) if split.at_work == 1)
        # The first run of each warms up.
        cold = (split for split, run in runs.items() if run.count == 0 and run.seconds < HOPELESS * shortest)
        near = untried(NEARLY * shortest if len(self.runs) < TRIES else 0.0)
        return next(chain(alone, cold, near), best)

    def predictions(self, pool: Pool) -> list[tuple[float, CallSplit]]:
        """Return the predicted seconds of every split that has not run, the shortest first. Predict anew when there is another run
        to go by."""
        basis = pool, self.failed, *((split, run.count > 0) for split, run in self.runs.items())
        if self._predictions[0] != basis:
            others = [split for split in candidates(self.work, pool) if split not in self.runs and split not in self.failed]
            made = [(self.predict(pool, split), split) for split in others]
            self._predictions = basis, sorted(made, key=lambda pair: pair[0])
        return self._predictions[1]

    def predict(self, pool: Pool, split: CallSplit, size: float = 1.0) -> float:
        """Return the predicted seconds on a split, given the runs on others. See `predict`."""
        reference = max(self.runs, key=lambda split: (self.runs[split].communication > 0, -self.runs[split].seconds))
        return predict(self.work, pool, split, reference, self.runs[reference], size)

    def alternative(self, pool: Pool, ranks: int) -> tuple[float, bool] | None:
        """Return (seconds, whether they were measured) with `ranks` ranks at work: of the best split that has run, or else
        predicted."""
        ran = [run.seconds for split, run in self.runs.items() if split.at_work == ranks and split not in self.failed]
        if ran:
            return min(ran), True
        return next(((seconds, False) for seconds, split in self.predictions(pool) if split.at_work == ranks), None)


def candidates(work: CallWork, pool: Pool) -> Iterator[CallSplit]:
    """Yield every split of a call that the settings allow."""
    for count in range(1, pool.size + 1):
        if pool.all_take_part and pool.size % count:
            continue
        ranks = tuple(range(pool.size)) if pool.all_take_part else pool.fastest(count)
        for batch in range(1, min(count, work.items) + 1):
            if count % batch or (work.items % batch and not pool.shares):
                continue
            if batch < count and not (work.sequence and work.attentions):  # no sequence, or no known cost of sharing it
                continue
            for ring, ulysses in factors(count // batch):
                split = CallSplit(ranks, batch, ring, ulysses)
                shares = [pool.shares_of(group) for group, _ in _groups(work, pool, split)]
                if all((ring, ulysses) in allowed(shape, ring * ulysses, pool.settings, own)
                       for shape, _ in work.attentions for own in shares):  # fmt: skip
                    yield split


def largest_part(work: CallWork, pool: Pool, split: CallSplit) -> float:
    """Return the largest part of the tokens and items that one rank has."""
    groups = [([pool.weight(rank) for rank in ranks], items) for ranks, items in _groups(work, pool, split)]
    return max(items / work.items * max(weights) / sum(weights) for weights, items in groups)


def predict(work: CallWork, pool: Pool, split: CallSplit, reference: CallSplit, run: Run, size: float = 1.0) -> float:
    """Return the predicted seconds of a call on a split, given a run on another one. `size`: tokens of the call, as a multiple of
    those of the run."""
    load, attention, communication = _parts(resized(work, size), pool, split)
    load_0, attention_0, communication_0 = _parts(work, pool, reference)
    scale = min(1.0, run.compute / attention_0) if attention_0 else 1.0
    rates = pool.measured.of(reference.ranks)
    rest = max(0.0, run.compute - scale * attention_0)
    fixed = min(max(0.0, rest - work.items * work.operations * load_0 / rates.linear), LAUNCHES * work.modules * rates.launch)
    link = _link(run, communication_0 + _weights(work, pool, run.compute)) or pool.link
    compute = (rest - fixed) * size * load / load_0 + fixed + scale * attention
    return compute + link * (communication + _weights(work, pool, compute))


def link_of(work: CallWork, pool: Pool, split: CallSplit, run: Run) -> float | None:
    """Return the time of a run's communication as a multiple of the predicted one; None where it sent nothing."""
    return _link(run, _parts(work, pool, split)[2] + _weights(work, pool, run.compute))


def resized(work: CallWork, size: float) -> CallWork:
    """Return the work of a call with `size` times the tokens."""
    shapes = [(replace(s, queries=round(s.queries * size), keys=round(s.keys * size)), count) for s, count in work.attentions]
    return replace(work, attentions=tuple(shapes), operations=work.operations * size, result=round(work.result * size))


def _link(run: Run, communication: float) -> float | None:
    return max(run.warm.communication / communication, LINK) if communication else None


def _parts(work: CallWork, pool: Pool, split: CallSplit) -> tuple[float, float, float]:
    """Return (load, seconds of attention, seconds of communication), each the largest of all groups."""
    link = pool.measured.of(split.ranks)
    load = attention = communication = 0.0
    for ranks, items in _groups(work, pool, split):
        rates = pool.measured.of(ranks)
        if not pool.measured.on_one_of_several(ranks):  # else only the result of the call leaves the machine
            rates = replace(rates, latency=link.latency, bandwidth=link.bandwidth)
        costs = [
            (count, cost(replace(shape, batch=shape.batch * items), split.ring, split.ulysses, pool.settings, rates,
                         pool.shares_of(ranks)))
            for shape, count in work.attentions
        ]  # fmt: skip
        load = max(load, items / work.items / sum(map(pool.speed, ranks)))
        attention = max(attention, sum(count * each.compute for count, each in costs))
        communication = max(communication, sum(count * each.communication for count, each in costs))
    gathers = (split.sequence > 1) + (split.batch > 1)
    return load, attention, communication + gathers * (link.latency + work.result / link.bandwidth)


def _weights(work: CallWork, pool: Pool, compute: float) -> float:
    """Return the seconds spent waiting for weights that every rank keeps a part of. `compute`: seconds of computing meanwhile."""
    rates = pool.measured.of(tuple(range(pool.size)))
    return max(0.0, work.weights / rates.bandwidth - rates.overlap * compute)


def _groups(work: CallWork, pool: Pool, split: CallSplit) -> list[tuple[tuple[int, ...], int]]:
    """Return the ranks of every group of a split, and the number of items that it computes."""
    formed = form_groups(len(split.ranks), split.groups, pool.shares_of(split.ranks))
    groups = [tuple(split.ranks[place] for place in group) for group in formed]
    shares = reduced(tuple(sum(map(pool.weight, ranks)) for ranks in groups[: split.batch]))
    items = split_sizes(work.items, split.batch, shares)
    return [(ranks, items[index % split.batch]) for index, ranks in enumerate(groups)]
