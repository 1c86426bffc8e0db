"""The time of a call on some ranks, predicted from one run of it on others.

A call is shared by the first ranks, in groups for items of the batch, each of which shares its sequence with the degrees that
`engine.cost` chooses for every attention (`Way`). The prediction uses one run of it the way s0 (`Run`), the rates measured at the
start of the ranks, and the cost of its attentions:

    compute(s) = max(host, W load(s) + a attention(s))
    seconds(s) = compute(s) + k (communication(s) + gathers(s) + weights(compute(s)))

| term | source |
|---|---|
| `load(s)` | part of the tokens and items that the slowest rank has, over its speed: 1 for one rank of mean speed |
| `attention`, `communication` | the cost model, of the slowest group; on the link inside of machines where each group is on one |
| `gathers` | the output, once per call: `latency + bytes / bandwidth` |
| `weights` | sharded weights, once per call: `max(0, bytes / bandwidth - overlap compute(s))` |
| `host` | launch time of the host for the work of s0, which fewer tokens do not lessen |
| `W` | computation of s0 beside attention, over load(s0); where the host was the limit, no more than its matrix products |
| `a` | 1, or less where s0 computed for a shorter time than its attentions should have taken |
| `k` | time of communication in s0 over the predicted one: the link as this call uses it; if s0 is one rank, as other calls did |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from cp_runtime.engine.cost import AttentionShape, cost, decide
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import form_groups, reduced
from cp_runtime.engine.ranks.sharding import Shares, batch_groups, split_sizes

WARM_UP = 2.0  # seconds at most for the connections of a first run
LINK = 0.2  # least factor by which a run corrects the link
HOST_BOUND = 0.8  # part of the time of computing from which on the host is the limit
PER_WIDTH = 16  # parameters of a block over the square of its width: 13 in Wan, 36 and 15 in Flux
HEAD_DIM = 128
PATCH = 4  # positions of a latent that become one token


@dataclass(frozen=True)
class CallWork:
    """The work of a call, independent of who computes it."""

    items: int  # batch items that groups can share out; 1 = none can
    sequence: bool  # whether ranks can share a sequence
    # Shapes of the shared attentions, over the whole sequence, for one item, with their counts; none where one rank computed
    attentions: tuple[tuple[AttentionShape, int], ...]
    operations: float  # of matrix products, of one item
    result: int = 0  # bytes of the output
    weights: int = 0  # bytes of its weight shard that every rank sends, where weights are sharded


class Way(NamedTuple):
    """Split of a call: by so many of the ranks, the first ones, in groups that compute items of the batch."""

    ranks: int
    groups: int = 1


@dataclass(frozen=True)
class Run:
    """Times of a call."""

    seconds: float  # until the last rank was done
    compute: float  # of the rank that computed longest
    communication: float  # of the rank that waited least: without waiting for late ranks
    host: float = 0.0  # launch time of the slowest host; 0 where the host itself computes

    @property
    def warm(self) -> Run:
        """The same run without the time for making connections, at best."""
        spared = min(WARM_UP, self.communication)
        return replace(self, seconds=self.seconds - spared, communication=self.communication - spared)


@dataclass(frozen=True)
class Ranks:
    """Candidate ranks for a call."""

    measured: Measured  # of all ranks
    shares: Shares  # of all ranks
    settings: SequenceSettings
    batch_degree: int = 0  # groups set by the user; 0 = chosen
    sharded: bool = False  # every rank keeps a shard of the weights
    most: int = 0  # ranks with the memory for the model, the first ones; 0 = all
    # Measured over predicted time of communication, from other calls; for calls without such a figure
    link: float = 1.0

    @property
    def size(self) -> int:
        return len(self.measured.each)

    def shares_of(self, ranks: Sequence[int]) -> Shares:
        return reduced(tuple(self.shares[rank] for rank in ranks)) if self.shares else ()

    def speed(self, rank: int) -> float:
        """Return the speed of a rank relative to the mean rank."""
        return self.shares[rank] * self.size / sum(self.shares) if self.shares else 1.0

    def groups(self, way: Way) -> list[tuple[int, ...]]:
        return [tuple(group) for group in form_groups(way.ranks, way.groups, self.shares_of(range(way.ranks)))]

    def group_shares(self, way: Way) -> Shares:
        return reduced(tuple(sum(self.shares[rank] for rank in group) for group in self.groups(way))) if self.shares else ()

    def way(self, work: CallWork, ranks: int) -> Way:
        """Return the way that so many ranks share a call."""
        degree = self.batch_degree if work.items > 1 or not work.sequence else 1
        shares = lambda groups: self.group_shares(Way(ranks, groups))  # noqa: E731
        return Way(ranks, batch_groups(work.items, ranks, degree, work.sequence, shares))

    def largest_part(self, ranks: int) -> float:
        """Return the largest part of a call among so many ranks."""
        return max(self.shares[:ranks]) / sum(self.shares[:ranks]) if self.shares else 1 / ranks


def predict(work: CallWork, ranks: Ranks, way: Way, reference: Way, run: Run) -> float:
    """Return the predicted seconds of a call split one way, given a run of it another way."""
    load, attention, communication = _parts(work, ranks, way)
    load_0, attention_0, communication_0 = _parts(work, ranks, reference)
    scale = min(1.0, run.compute / attention_0) if attention_0 else 1.0
    rest = max(0.0, run.compute - scale * attention_0)
    if run.host > HOST_BOUND * run.compute:
        linear = ranks.measured.of(*ranks.groups(reference)).linear
        rest = min(rest, work.items * work.operations * load_0 / linear)
    compute = max(run.host, rest * load / load_0 + scale * attention)
    link = _link(run, communication_0 + _weights(work, ranks, run.compute)) or ranks.link
    return compute + link * (communication + _weights(work, ranks, compute))


def link_of(work: CallWork, ranks: Ranks, way: Way, run: Run) -> float | None:
    """Return the time of a run's communication as a multiple of the predicted one; None without communication."""
    return _link(run, _parts(work, ranks, way)[2] + _weights(work, ranks, run.compute))


def on_one_rank(work: CallWork, ranks: Ranks) -> Run:
    """Return the run of a call on the first rank, by the rates alone."""
    rates = ranks.measured.of((0,))
    attention = sum(count * cost(shape, 1, 1, ranks.settings, rates).compute for shape, count in work.attentions)
    seconds = work.items * (work.operations / rates.linear + attention)
    return Run(seconds, seconds, 0.0)


def guess(parameters: float, blocks: int, itemsize: int, latent: Sequence[int], items: int) -> CallWork | None:
    """Estimate the work of a call before its first run; None where the model's blocks are unknown.

    Whether a link is worth its time depends mostly on the width of the blocks, and hardly on the number of tokens: communication
    and most of the computation grow with it alike.

    Args:
        parameters: of all blocks.
        itemsize: bytes of a number in the hidden states.
        latent: its shape.
        items: batch items that can be computed separately.
    """
    if not blocks or len(latent) < 3:
        return None
    heads = max(1, round((parameters / blocks / PER_WIDTH) ** 0.5 / HEAD_DIM))
    tokens = max(1, prod(latent[2:]) // PATCH)
    shape = AttentionShape(1, tokens, tokens, heads, heads, HEAD_DIM, itemsize)
    return CallWork(items, True, ((shape, blocks),), 2 * parameters * tokens, itemsize * prod(latent))


def _link(run: Run, communication: float) -> float | None:
    return max(run.communication / communication, LINK) if communication else None


def _parts(work: CallWork, ranks: Ranks, way: Way) -> tuple[float, float, float]:
    """Return (load, seconds of attention, seconds of communication), each the largest of all groups."""
    groups, measured, settings = ranks.groups(way), ranks.measured, ranks.settings
    inside, across = measured.of(*groups), measured.of(range(way.ranks))
    load = attention = communication = 0.0
    for group, items in zip(groups, split_sizes(work.items, way.groups, ranks.group_shares(way)), strict=True):
        rates, shares = replace(measured.of(group), latency=inside.latency, bandwidth=inside.bandwidth), ranks.shares_of(group)
        costs = [
            (count, decide(replace(shape, batch=shape.batch * items), len(group), settings, rates, shares)[1])
            for shape, count in work.attentions
        ]
        load = max(load, items / work.items / sum(map(ranks.speed, group)))
        attention = max(attention, sum(count * each.compute for count, each in costs))
        communication = max(communication, sum(count * each.communication for count, each in costs))
    gathers = (len(groups[0]) > 1) + (way.groups > 1)
    return load, attention, communication + gathers * (across.latency + work.result / across.bandwidth)


def _weights(work: CallWork, ranks: Ranks, compute: float) -> float:
    """Return the seconds spent waiting for sharded weights. `compute`: seconds of computing meanwhile."""
    rates = ranks.measured.of(range(ranks.size))
    return max(0.0, work.weights / rates.bandwidth - rates.overlap * compute)
