"""Choice of a model's placement, i.e. where the ranks keep its weights: the user's setting, or the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.weights.blocks import Sizes
from ..errors import UnsupportedError
from ..pool.config import RuntimeConfig
from ..pool.settings import OFFLOADED, PLACEMENTS, SHARDED, STAGED, WHOLE, label_of, with_labels
from ..recent import Recent

GB = 1e9


class Demand(NamedTuple):
    """The memory of a model."""

    sizes: Sizes  # of its transformer's weights
    call: float  # bytes that ComfyUI expects a call to take on one device, without weights
    stages: int = 0  # most stages it can be divided into
    beside: tuple[Sizes, ...] = ()  # of ControlNets, which ranks keep as they keep the model

    @property
    def weights(self) -> int:
        return self.sizes.whole

    def on_device(self, placement: str, ranks: int, stages: int = 0, shared: int = 0) -> int:
        """Return the largest bytes of weights on the device of one rank. `stages`: of a staged model; 0 = one per rank. `shared`:
        blocks that are not whole on every device; 0 = all."""
        if placement == WHOLE:
            return self.weights
        if placement == STAGED:  # a stage ends between two blocks, so it may have up to a block more than its share
            return min(self.weights, self.sizes.rest + self.sizes.blocks // (stages or ranks) + self.sizes.largest)
        return self.sizes.per_rank(ranks, on_host=placement == OFFLOADED, shared=shared)

    def per_rank(self, placement: str, ranks: int, shared: int = 0) -> float:
        """Return the bytes on the device of one rank, with its part of a call."""
        alike, on_host = placement in (SHARDED, OFFLOADED), placement == OFFLOADED
        beside = sum(each.per_rank(ranks, on_host=on_host) if alike else each.whole for each in self.beside)
        return self.on_device(placement, ranks, shared=shared) + beside + self.call / (1 if placement == STAGED else ranks)

    def fewest_shared(self, placement: str, ranks: int, room: float, least: int = 0) -> int:
        """Return the fewest blocks that ranks have to share so that the others fit whole on every device; 0 = sharing all is not
        enough, or there are too few blocks. `least`: as many at least."""
        counts = range(max(1, least), self.sizes.number)
        return next((count for count in counts if self.per_rank(placement, ranks, count) <= room), 0)

    @property
    def besides(self) -> float:
        """Bytes besides the model's weights, on one device."""
        return self.call + sum(each.whole for each in self.beside)


def held_parts(choice: Choice, held: int, whole: int, unit: str, ranks: int) -> dict[str, str]:
    """Return the parts of the words about a model's weights: `case`, the key of its text, of "held", and the numbers as
    text. `held`: bytes on the device of one rank; `whole`: of all weights; `unit`: see `run_stats.unit_of`."""
    case = "shared" if unit == "process" and choice.placement == WHOLE else "some" if choice.most else choice.placement
    held_gb, whole_gb = (f"{each / GB:.0f}" if each >= 10 * GB else f"{each / GB:.2g}" for each in (held, whole))
    return {"case": case, "held": held_gb, "whole": whole_gb, "unit": unit, "count": str(choice.most), "all": str(ranks)}


class Choice(NamedTuple):
    """A placement, and its reason, in words."""

    placement: str
    reason: str
    most: int = 0  # ranks that a call can use, the first ones: the others have too little memory; 0 = all
    shared: int = 0  # blocks that are not whole on every device; 0 = all, where the placement shares any

    @property
    def place(self) -> tuple[str, int]:
        """What ranks have to load the model again for."""
        return self.placement, self.shared

    @property
    def tried(self) -> str:
        """The placement that is too large where this one is: with more blocks shared it may fit."""
        return PLACEMENTS[PLACEMENTS.index(self.placement) - 1] if self.shared else self.placement


@dataclass
class Resident:
    """A model on the ranks: its weight patches and placement."""

    name: str  # of its file, in its model folder
    patches_uuid: str
    choice: Choice
    asked: tuple[str, float, int]  # settings at the time of the choice: weights, memory per rank, and stages
    call_bytes: float  # expected bytes of a call at that time, ControlNets included
    device_bytes: int  # of weights, on the device of one rank
    stages: int  # of its blocks, where it is staged
    parts: dict[str, str]  # parts of the words about its memory, see `held_parts`
    casts: bool = False  # rank 0 casts weights that it multiplies natively by itself, as other ranks cannot
    aside: bool = False  # moved off this process's device until its next call


def choose(
    config: RuntimeConfig,
    demand: Demand,
    room: float | None,
    at_least: str = WHOLE,
    slow_link: bool = False,
    free: Sequence[int] = (),
    least_shared: int = 0,
) -> Choice:
    """Choose the placement of a model before its load.

    Args:
        room: device bytes available to a rank; None where that has no meaning, as on a CPU: there ranks share the pages of the
            file, so that all of them together hold the model once.
        at_least: a placement to start from, because a rank ran out of memory with the previous one.
        slow_link: a call waited longer for sharded weights than a whole call on one device would take.
        free: device bytes available to each rank, where calls may leave ranks out.
        least_shared: blocks that were shared before, as the placement to start from; 0 = it was chosen with all shared.

    Raises:
        UnsupportedError: the user's placement does not fit into the memory that the user has set.
    """
    ranks = config.world_size
    if config.pipeline is not None:
        stages = config.pipeline.stages
        held = demand.on_device(STAGED, ranks, stages) / GB
        return Choice(STAGED, f"staged, as set: {demand.weights / GB:.3g} GB of weights in {stages} stages of {held:.3g} GB")
    if config.weights != "auto":
        needed = demand.per_rank(config.weights, ranks)
        if config.memory_per_rank and needed > config.memory_per_rank * GB:
            why = (
                f"weights: Set it to auto, raise memory_per_rank, or use more devices. Got {config.weights}, with which each of "
                f"{ranks} ranks needs {needed / GB:.3g} GB; memory_per_rank allows {config.memory_per_rank:.3g} GB."
            )
            raise UnsupportedError(with_labels(why))
        reason = f"{config.weights}, as set: {_on_each(demand, config.weights, ranks)}"
        if demand.on_device(config.weights, ranks) > demand.weights:
            reason += ", which is more than all of them: two of its few large blocks are there at a time"
        return Choice(config.weights, reason)
    if room is None:
        return Choice(WHOLE, f"whole: {demand.weights / GB:.3g} GB of weights, which CPU ranks share")
    if slow_link and demand.on_device(WHOLE, ranks) > room >= demand.per_rank(STAGED, ranks):
        return Choice(STAGED, f"staged: {_on_each(demand, STAGED, ranks)}, as the link is too slow to share them out")
    most = ranks_with_room(demand, free) if at_least == WHOLE and demand.per_rank(SHARDED, ranks) > room else 0
    if most:  # weights from the host's memory, in every block, cost more than a small device adds
        small = ", ".join(f"{each / GB:.3g} GB" for each in free[most:])
        first = f"{demand.weights / GB:.3g} GB of weights on the first {most} of {ranks} devices"
        return Choice(WHOLE, f"whole: {first}; the others have {small} free", most)
    for placement in PLACEMENTS[PLACEMENTS.index(at_least) :]:
        before = least_shared if placement == at_least else 0
        mixes = placement != WHOLE and (before > 0 or placement != at_least)
        if mixes and (shared := demand.fewest_shared(placement, ranks, room, before)):
            held = demand.on_device(placement, ranks, shared=shared) / GB
            how = f"{shared} of {demand.sizes.number} blocks are shared{' from the host' if placement == OFFLOADED else ''}"
            reason = f"{placement}: {how}, {held:.3g} of {demand.weights / GB:.3g} GB are on each of {ranks} devices"
            return Choice(placement, reason, shared=shared)
        if demand.per_rank(placement, ranks) <= room:
            beside = f", beside {(demand.besides - demand.call) / GB:.3g} GB of ControlNets" if demand.beside else ""
            return Choice(placement, f"{placement}: {_on_each(demand, placement, ranks)} of {room / GB:.3g} GB{beside}")
    if not demand.sizes.blocks:
        return Choice(WHOLE, f"whole: {demand.weights / GB:.3g} GB of weights, none of which can be shared out")
    # If a model has a few large blocks, two of them and a shard take more than all of it.
    least = min(PLACEMENTS, key=lambda placement: demand.on_device(placement, ranks))
    limit = f"{room / GB:.3g} GB that " + (f"{label_of('memory_per_rank')} allows" if config.memory_per_rank else "are free")
    return Choice(least, f"{least}: {_on_each(demand, least, ranks)}, more than the {limit}")


def ranks_with_room(demand: Demand, free: Sequence[int]) -> int:
    """Return the largest number of first ranks, less than all, whose devices have room for the whole model. `free`: bytes."""
    return next((count for count in range(len(free) - 1, 0, -1) if min(free[:count]) >= demand.per_rank(WHOLE, count)), 0)


def next_smaller(demand: Demand, placement: str, ranks: int) -> str | None:
    """Return the first later placement with less device memory, or None: two large blocks may take more than the whole model."""
    held = demand.on_device(placement, ranks)
    behind = PLACEMENTS[PLACEMENTS.index(placement) + 1 :]
    return next((other for other in behind if demand.on_device(other, ranks) < held), None)


def _on_each(demand: Demand, placement: str, ranks: int) -> str:
    held = demand.on_device(placement, ranks) / GB
    if placement == WHOLE:
        return f"{held:.3g} GB of weights on each of {ranks} devices"
    return f"{demand.weights / GB:.3g} GB of weights as {ranks} × {held:.3g} GB"


SHORTAGES_KEPT = 256  # models and kinds of calls: every size of picture is a kind


class Shortages:
    """Placements of models, and splits of calls, that take more memory than the devices have. The oldest of many are forgotten."""

    def __init__(self) -> None:
        self._tried: Recent[tuple[tuple[str, ...], str], frozenset[Any]] = Recent(SHORTAGES_KEPT)

    def note(self, devices: tuple[str, ...], name: str, tried: Any) -> None:
        """Record that a rank ran out of memory, with a model by its key or a kind of call. `devices`: of all ranks; `tried`:
        placement of the model, or split of the call."""
        self._tried[devices, name] = self.of(devices, name) | {tried}

    def of(self, devices: tuple[str, ...], name: str) -> frozenset[Any]:
        """Return the failed placements of a model or splits of a kind of call."""
        return self._tried.get((devices, name), frozenset())

    def forget(self) -> None:
        """Forget everything: the user starts again, perhaps with more memory."""
        self._tried.clear()


def asked_of(config: RuntimeConfig) -> tuple[str, float, int]:
    """Return the settings that decide a model's placement: see `Resident.asked`."""
    return config.weights, config.memory_per_rank, 0 if config.pipeline is None else config.pipeline.stages
