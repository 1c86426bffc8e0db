"""The time of a call on some devices, predicted from that on one of them, with given rates.

The devices are alike. A call is shared by the first ones, in groups for items of the batch, each of which shares its sequence with
the degrees that `cp_runtime.engine.cost` chooses for every attention (`Way`):

    seconds(way) = rest load(way) + a attention(way) + communication(way)

| term | source |
|---|---|
| `load` | part of the tokens and items that the slowest device has: 1 for one device |
| `attention`, `communication` | the cost model, of the slowest group; on the link inside of machines where each group is on one; and the latency of gathering the output |
| `rest` | computation of one device beside attention |
| `a` | 1, or less where one device computed for a shorter time than its attentions should have taken |
"""  # noqa: E501  (a table)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_runtime.engine.cost import AttentionShape, decide
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import form_groups
from cp_runtime.engine.ranks.sharding import batch_groups, split_sizes


@dataclass(frozen=True)
class CallWork:
    """The work of a call, independent of who computes it."""

    items: int  # batch items that groups can share out
    attentions: tuple[tuple[AttentionShape, int], ...]  # shapes over the whole sequence, for one item, with their counts
    operations: float  # of matrix products, of one item


class Way(NamedTuple):
    """Split of a call: by so many of the devices, the first ones, in groups that compute items of the batch."""

    ranks: int
    groups: int = 1


@dataclass(frozen=True)
class Ranks:
    """Devices for a call."""

    measured: Measured
    settings: SequenceSettings

    def groups(self, way: Way) -> list[tuple[int, ...]]:
        return [tuple(group) for group in form_groups(way.ranks, way.groups, ())]

    def way(self, work: CallWork, count: int) -> Way:
        """Return the way that so many devices share a call."""
        return Way(count, batch_groups(work.items, count, 0, True, lambda groups: ()))


def predict(work: CallWork, ranks: Ranks, way: Way, alone: float) -> float:
    """Return the predicted seconds of a call split one way. `alone`: seconds on one device."""
    _, whole, _ = _parts(work, ranks, Way(1))
    load, attention, communication = _parts(work, ranks, way)
    scale = min(1.0, alone / whole)
    return (alone - scale * whole) * load + scale * attention + communication


def _parts(work: CallWork, ranks: Ranks, way: Way) -> tuple[float, float, float]:
    """Return (load, seconds of attention, seconds of communication), each the largest of all groups."""
    groups, measured = ranks.groups(way), ranks.measured
    inside, across = measured.of(*groups), measured.of(range(way.ranks))
    load = attention = communication = 0.0
    for group, items in zip(groups, split_sizes(work.items, way.groups), strict=True):
        rates = replace(measured.of(group), latency=inside.latency, bandwidth=inside.bandwidth)
        costs = [
            (count, decide(replace(shape, batch=shape.batch * items), len(group), ranks.settings, rates)[1])
            for shape, count in work.attentions
        ]
        load = max(load, items / work.items / len(group))
        attention = max(attention, sum(count * each.compute for count, each in costs))
        communication = max(communication, sum(count * each.communication for count, each in costs))
    gathers = (len(groups[0]) > 1) + (way.groups > 1)
    return load, attention, communication + gathers * across.latency
