"""The models on the ranks, as recorded by this process: their weight patches and the placement of their weights."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..engine.weights.packing import round_up
from ..errors import ContextParallelError, RankOutOfMemory
from ..pool.blocks import SharedBlock
from ..pool.config import RuntimeConfig
from ..pool.messages import AttachNetwork, Available, Describe, Drop, Load, Locate, MakeRoom, Region
from ..pool.protocol import ALIGNMENT, TensorPacker
from ..pool.settings import OFFLOADED, PLACEMENTS, SHARDED, STAGED, WHOLE
from ..pool.tensor_cache import CallEncoder
from ..pool.worker_pool import WorkerPool
from .calls import Code, ModelCall, ModelState
from .placement import GB, Choice, Resident, Shortages, asked_of, choose, held_parts, next_smaller
from .run_stats import unit_of

log = logging.getLogger("context_parallel")

UNLOAD_TIMEOUT = 15.0  # seconds; ComfyUI's memory manager waits for it while it loads another model
WARN_BYTES = 10**7  # weights sent over a network at every load; above this the log warns


class Models:
    """Models and networks on the ranks of a pool. One caller at a time; any thread may read the attributes.

    Args:
        shortages: out-of-memory events on ranks, in this pool or an earlier one.
        on_change: called when the status has changed.

    Attributes:
        name: of the model of the last load or call; empty before.
        encoder: of arguments of calls; ranks keep the tensors.
        resident: models on the ranks, by key; meaningless once the ranks have ended.
        slow: keys of models whose weights take longer over the link than a call on one device.
    """

    def __init__(self, pool: WorkerPool, shortages: Shortages, on_change: Callable[[], None]) -> None:
        self.name = ""
        self.encoder = CallEncoder()
        self.slow: set[str] = set()
        self._pool, self._shortages, self._on_change = pool, shortages, on_change
        self.resident: dict[str, Resident] = {}
        self._formats: tuple[str, ...] | None = None
        self._compared: set[tuple[tuple[str, ...], str]] = set()
        self._networks: dict[str, tuple[weakref.ref[nn.Module], str]] = {}  # by key, with the placement

    @property
    def names(self) -> list[str]:
        """Their files, as ComfyUI's loaders name them."""
        return sorted(self.placements)

    @property
    def placements(self) -> dict[str, str]:
        """Placement of each on the ranks, and the reason, in words; by name."""
        found: dict[str, str] = {}
        for resident in list(self.resident.values()):
            same = sum(name == resident.name or name.startswith(f"{resident.name} (") for name in found)
            found[f"{resident.name} ({same + 1})" if same else resident.name] = resident.choice.reason
        return found

    @property
    def memory(self) -> dict[str, dict[str, str]]:
        """Memory of each on every device of the ranks: `Resident.parts`; by name."""
        return {resident.name: resident.parts for resident in list(self.resident.values())}

    @property
    def held(self) -> dict[str, Resident]:
        """The models on live ranks, by key."""
        return self.resident if self._pool.alive else {}

    def begin(self, name: str) -> None:
        """Record the name of the model of a load or a call."""
        self.name = name
        self._on_change()

    def has(self, config: RuntimeConfig, target: ModelState) -> bool:
        """Return whether the ranks hold this state of a model, with a placement that suits the next calls."""
        resident = self.held.get(target.key)
        if resident is None or (resident.patches_uuid, resident.asked) != (target.patches_uuid, asked_of(config)):
            return False
        if config.weights != "auto" or config.pipeline is not None:
            return True
        if self._wants_stages(target) and resident.choice.placement in (SHARDED, OFFLOADED):
            return False
        may_share_more = resident.choice.shared > 0 or resident.choice.placement not in (OFFLOADED, STAGED)
        return target.demand.besides <= resident.call_bytes or not may_share_more

    def choose_placement(self, config: RuntimeConfig, target: ModelState, cancelled: Callable[[], bool]) -> Choice:
        """Choose a model's placement. Models already on the ranks can be evicted, so their memory counts as free."""
        if config.weights != "auto" or config.pipeline is not None:
            return choose(config, target.demand, None)
        free = [reply.available for reply in self._pool.request(Available(), cancelled=cancelled)]
        room = config.memory_per_rank * GB or self.common_room(free)
        # Ranks that share a device are for tests; stages, of a transformer: a VAE's rows are of all ranks.
        apart = config.chooses_ranks and target.demand.stages and not config.memory_per_rank and room is not None
        by_rank = [each for each in free if each is not None] if apart and len(set(config.devices)) == len(free) else ()
        resident, shared = self.held.get(target.key), 0
        tried = self._shortages.of(config.devices, target.kind)
        known = [next_smaller(target.demand, each, config.world_size) or each for each in tried if each != STAGED]
        at_least = max(known, key=PLACEMENTS.index, default=WHOLE)
        slow = self._wants_stages(target) and STAGED not in tried
        if resident is not None and resident.asked == asked_of(config) and resident.choice.placement != STAGED:  # for a larger call
            place = resident.choice.placement
            if PLACEMENTS.index(place) > PLACEMENTS.index(at_least):
                at_least, shared = place, resident.choice.shared
        return choose(config, target.demand, room, at_least, slow, by_rank, shared)

    def _wants_stages(self, target: ModelState) -> bool:
        """Return whether a link was too slow for a model's weights, and there are blocks for a stage per rank."""
        return target.key in self.slow and target.demand.stages >= self._pool.world_size

    def use_less_memory(self, target: ModelState) -> None:
        """Record that a rank ran out of memory: from its next load on, the model takes less of it where it can."""
        resident = self.resident.get(target.key)
        if resident is not None:
            self._shortages.note(self._pool.config.devices, target.kind, resident.choice.tried)

    def common_room(self, free: list[int | None]) -> int | None:
        """Return the bytes available on every rank, from each rank's free device memory; None where ranks are CPUs."""
        known = [each for each in free if each is not None]
        devices = self._pool.config.devices
        if len(known) < len(free):
            return None
        return min(known) * len(set(devices)) // len(devices)  # each of the ranks that share a device counts its memory

    def drop(self, forgotten: Collection[str], cancelled: Callable[[], bool]) -> None:
        """Make the ranks drop models that this process no longer has, by their keys, and the networks of vanished patches."""
        gone = [key for key, (network, _) in self._networks.items() if network() is None]
        if gone or forgotten:
            self._drop((*gone, *forgotten), cancelled=cancelled)

    def load(self, config: RuntimeConfig, target: ModelState, choice: Choice, cancelled: Callable[[], bool]) -> None:
        """Make the ranks' model equal to `target`, with the chosen placement. Raises MirrorError if a rank's model is not the UI's,
        PoolError if the pool failed."""
        resident = self.held.get(target.key)
        stages = config.staged.stages
        same_place = resident is not None and resident.choice.place == choice.place
        same = same_place and resident is not None and resident.patches_uuid == target.patches_uuid
        if resident is not None and same and (choice.placement != STAGED or resident.stages == stages):
            # The same weights with the same placement: only the settings behind the choice are new.
            resident.choice, resident.asked, resident.call_bytes = choice, asked_of(config), target.demand.besides
            return
        held = target.demand.on_device(choice.placement, self._pool.world_size, stages, choice.shared)
        request, packer = target.request(choice.placement, held)
        formats, travelled = self._common_formats(cancelled), bool(self._pool.apart)
        request = replace(
            request,
            stages=stages,
            shared=choice.shared,
            formats=formats,
            travelled=travelled,
            memory_nbytes=round_up(packer.nbytes, mmap.PAGESIZE),
        )
        self.resident.pop(target.key, None)  # until all ranks have answered, nobody knows what they hold
        name = target.name
        self.begin(name)
        try:
            with contextlib.closing(SharedBlock()) as memory:  # not that of messages: the ranks keep it
                with self._pool.named_errors("load"):
                    packer.write(memory.view(request.memory_nbytes))
                    if travelled and not same_place:
                        request = replace(request, sent=self._sent(target, cancelled))
                        self._add(memory, request, target)
                request = replace(request, memory=memory.address)
                whole = memory.view(memory.size)  # all of it, as ranks see it
                replies = self._pool.request(request, kept=whole, cancelled=cancelled)
                own, ask = whole[: request.memory_nbytes], partial(self._pool.request, cancelled=cancelled)
                target.verify(request, own, replies, self._pool.pids, ask)
        except BaseException as error:
            if isinstance(error, RankOutOfMemory):
                self._shortages.note(self._pool.config.devices, target.kind, choice.tried)
            self._forget(target.key)
            raise
        parts = held_parts(choice, held, target.demand.weights, unit_of(config.device_type), self._pool.world_size)
        asked, expected = asked_of(config), target.demand.besides
        casts = choice.placement == WHOLE and replies[0].casts
        self.resident[target.key] = Resident(name, target.patches_uuid, choice, asked, expected, held, stages, parts, casts)
        log.info(
            "%s (%.0f MB, %d patched weights) is on %d ranks after %.1f s; %s",
            name, replies[0].bytes / 1e6, len(request.patches), self._pool.world_size,
            max(reply.seconds for reply in replies), choice.reason,
        )  # fmt: skip

    def _sent(self, target: ModelState, cancelled: Callable[[], bool]) -> tuple[Region, ...]:
        """Return the parts of a model that are sent to ranks which cannot map them: all that some other computer does not have in
        its own files."""
        if not self._pool.hosts:
            return tuple(target.regions)
        copies = target.copies()
        replies = self._pool.request(Locate(copies=copies), cancelled=cancelled) if copies else []
        there = set(range(len(copies))).intersection(*(replies[rank].found for rank in self._pool.apart if replies))
        located = {copies[index].region for index in there}
        sent = tuple(region for region in target.regions if region not in located)
        nbytes, total = (sum(nbytes for _, _, nbytes in regions) for regions in (sent, target.regions))
        log.log(
            logging.WARNING if nbytes > WARN_BYTES else logging.INFO,
            "%s: %.2g of %.2g GB of weights go over the network to %s, and the rest is in files there",
            target.name, nbytes / 1e9, total / 1e9, ", ".join(self._pool.hosts),
        )  # fmt: skip
        return sent

    @staticmethod
    def _add(memory: SharedBlock, request: Load, target: ModelState) -> None:
        """Put parts of a model behind what else is sent."""
        blocks = [block.pages for block in target.blocks]
        sizes = (round_up(nbytes, ALIGNMENT) for _, _, nbytes in request.sent)
        ends = [*itertools.accumulate(sizes, initial=request.memory_nbytes)]
        whole = memory.view(ends[-1])
        for begin, (block, offset, nbytes) in zip(ends, request.sent, strict=False):
            whole[begin : begin + nbytes].copy_(blocks[block][offset : offset + nbytes])

    def _common_formats(self, cancelled: Callable[[], bool]) -> tuple[str, ...]:
        """Return the quantised formats that the devices of all ranks multiply in. Ranks know: this process may not see all
        devices."""
        if self._formats is None:
            first, *others = (set(reply.formats) for reply in self._pool.request(Available(), cancelled=cancelled))
            self._formats = tuple(sorted(first.intersection(*others)))
        return self._formats

    def _forget(self, key: str) -> None:
        """Make healthy ranks drop an object that other ranks failed to take: it would never be freed otherwise."""
        with contextlib.suppress(ContextParallelError):  # the ranks' error is the one to show
            if self._pool.alive:
                self._drop((key,), timeout=UNLOAD_TIMEOUT)

    def _drop(self, keys: Sequence[str], **waiting: Any) -> None:
        """Make the ranks drop models and networks, and their cached conditioning. For `waiting` see `WorkerPool.request`."""
        for key in keys:
            self.resident.pop(key, None)
            self._networks.pop(key, None)
        self.encoder.reset()
        self._pool.request(Drop(keys=tuple(keys)), **waiting)

    def attach_networks(self, call: ModelCall, model: str, cancelled: Callable[[], bool]) -> None:
        """Send the networks of a call's patches, and of its ControlNets, each once. Ranks keep the latter as they keep the model,
        by its key, and others whole: nobody knows when these run."""
        placement = self.resident[model].choice.placement
        for key, network in call.networks.items():
            own = placement if placement in (SHARDED, OFFLOADED) and key in call.controlnets else WHOLE
            there = {other: held for other, (known, held) in self._networks.items() if known() is network}
            if there == {key: own}:
                continue
            if there:  # it has changed since, or its place
                self._drop(list(there), cancelled=cancelled)
            packer = TensorPacker()
            leaves = tuple(packer.add(each, key) for each in call.encode_network(network))
            try:
                with contextlib.closing(SharedBlock()) as memory:  # the ranks keep it: one copy for all
                    with self._pool.named_errors("attach"):
                        packer.write(memory.view(round_up(packer.nbytes, mmap.PAGESIZE)))
                    request = AttachNetwork(key=key, leaves=leaves, memory=memory.address, placement=own)
                    self._pool.request(request, kept=memory.view(memory.size), cancelled=cancelled)
            except BaseException:
                self._forget(key)
                raise
            self._networks[key] = weakref.ref(network), own

    def compare_code(self, used: Code | None, cancelled: Callable[[], bool]) -> None:
        """Compare code with that of the ranks, once."""
        if used is None or (used.roots, used.digest) in self._compared:
            return
        used.compare(self._pool.request(Describe(key="", roots=used.roots, packs=used.packs), cancelled=cancelled))
        self._compared.add((used.roots, used.digest))

    def unload(self, key: str) -> None:
        """Make the ranks drop a model, all networks, and their cached conditioning."""
        self._drop((key, *self._networks), timeout=UNLOAD_TIMEOUT)
        self._pool.trim()

    def make_room(self, device: str, key: str | None) -> None:
        """Make the ranks on a device free cached memory, and the memory of the model `key`, if any, until its next call.

        A sharded model leaves all devices, and the host's memory as well, since the shards on the other ranks would be of no use.
        """
        ranks = {rank for rank, other in enumerate(self._pool.config.devices) if other == device}
        if key is not None:
            ranks = set(range(self._pool.world_size)) if self.sharded(key) else ranks
            self.resident[key].aside = True
            self.encoder.reset()
        self._pool.request(MakeRoom(key=key, ranks=tuple(sorted(ranks))), timeout=UNLOAD_TIMEOUT)

    def sharded(self, key: str) -> bool:
        return self.resident[key].choice.placement != WHOLE
