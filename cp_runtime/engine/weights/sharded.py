"""Blocks of a model that every rank keeps 1/N of. They are put together while they run.

The bytes of a block's weights are one run (`packing`), cut into pieces, and each piece into as many parts as there are ranks. An
all-gather puts a piece together in a buffer; the block's parameters are views of that. There are two buffers: while one block runs,
the next one is fetched, in the order of the last call, and in as many portions as the block has attentions and one more, because
its exchanges use the same link: a portion starts behind an attention, and runs beside what comes after, where ranks may send two
things at a time (`RankGroup.may_overlap`).

Every rank enters the same blocks in the same order, so that all of them send the same pieces.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ...errors import PlanError
from ..collectives import Pending, RankGroup
from .blocks import Block, blocks_of
from .packing import ALIGNMENT, Packing, round_up
from .pinned import pinned_zeros

PIECES = 8  # of a block
SMALLEST_PIECE = 4 << 20  # bytes


class SharedBlock:
    """A block that this rank keeps its part of.

    Args:
        block: has its weights in its slots.
        weights: to take instead of those, for example with a LoRA in them; they may lie anywhere.
        on_host: keep the part in the host's memory.
    """

    def __init__(
        self, block: Block, weights: list[Tensor], ranks: RankGroup, device: torch.device, on_host: bool, remedy: str
    ) -> None:
        self.block = block
        self.packing = Packing(weights)
        pieces = min(PIECES, max(1, self.packing.nbytes // SMALLEST_PIECE))
        self.part = round_up(-(-self.packing.nbytes // (pieces * ranks.size)), ALIGNMENT)  # bytes of a piece per rank
        self.piece = self.part * ranks.size
        self.nbytes = self.piece * pieces
        nbytes = pieces * self.part
        run = pinned_zeros(nbytes, device) if on_host else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.shard = run.view(pieces, self.part)
        for number, own in enumerate(self.shard):
            self.packing.copy_range(weights, number * self.piece + ranks.rank * self.part, own)
        self.attentions = 0  # that its last run had
        self.running = 0
        self.is_whole = True  # its slots have its weights
        self._remedy = remedy
        with _plain():
            self._absent = self.packing.absent(device, list(block.slots), remedy)
        self._put = block.weights  # contents of the slots, unless somebody else has put another weight there
        self.fill(None)

    def check(self) -> None:
        """Raise PlanError if somebody has put a weight of his own into the block, which would be lost."""
        for path, weight, put in zip(self.block.slots, self.block.weights, self._put, strict=True):
            if weight is not put:
                raise PlanError(f"{path} was replaced while every rank keeps a part of what it was. {self._remedy}")

    def fill(self, run: Tensor | None) -> None:
        """Take its weights from a run of bytes, or stand-ins if there is none. Weights that somebody else put there stay."""
        with _plain():
            new = self._absent if run is None else self.packing.views(run)
            ours = [weight is put for weight, put in zip(self.block.weights, self._put, strict=True)]
            self.block.put([made if own else other for made, own, other in zip(new, ours, self.block.weights, strict=True)])
            self._put = [now if own else put for now, own, put in zip(self.block.weights, ours, self._put, strict=True)]
        self.is_whole = run is not None


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Make tensors inside the context of the kind that weights are (see Block), good for every mode, whichever the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Buffer:
    """Room for one block.

    Attributes:
        holder: the block that is in it, or comes.
        fetched: number of its pieces that have been asked for.
        pending: those that are on their way.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage
        self.holder: SharedBlock | None = None
        self.fetched = 0
        self.pending: list[Pending] = []


class ShardedWeights:
    """The weights of a model's blocks, shared out over ranks.

    Nothing is shared out until `keep` says so. From then on every rank must run the model alike.

    Args:
        model: any module, in eval mode.
        ranks: that share the weights. Nobody else sends on their process group.
        device: where the model computes.
        on_host: keep the shards in the host's memory. A call then takes them from there.
        remedy: advice to a user whose model cannot run like this; part of messages.
    """

    def __init__(
        self, model: nn.Module, ranks: RankGroup, device: torch.device, *, on_host: bool = False, remedy: str = ""
    ) -> None:
        self.blocks = {block.name: block for block in blocks_of(model)}
        self._ranks, self._device, self._on_host, self._remedy = ranks, device, on_host, remedy
        self._shared: dict[str, SharedBlock] = {}
        self._buffers: list[Buffer] = []
        self._order: list[SharedBlock] = []  # of the last call
        self._entered: list[SharedBlock] = []  # in this one
        self._place = 0  # in the order
        self._attentions = 0  # since a block was entered
        self._beside_others = ranks.may_overlap
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self._hooks = []
        for block in self.blocks.values():
            # In front of the plan's, whichever came first: a rank may load its model again at any time.
            enter, leave = partial(self._enter, block.name), partial(self._leave, block.name)
            self._hooks.append(block.module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(block.module.register_forward_hook(leave))

    @property
    def nbytes(self) -> int:
        """Bytes that are kept on the device."""
        shards = 0 if self._on_host else sum(shared.shard.nbytes for shared in self._shared.values())
        return shards + sum(buffer.storage.nbytes for buffer in self._buffers)

    def keep(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Keep this rank's part of a block, and let go of its weights.

        `weights`: to take instead of some of those that are in its slots, by their paths in the model.
        """
        block, others = self.blocks[name], weights or {}
        taken = [others.get(path, own) for path, own in zip(block.slots, block.weights, strict=True)]
        old = self._shared.get(name)
        new = self._shared[name] = SharedBlock(block, taken, self._ranks, self._device, self._on_host, self._remedy)
        self._order = [new if each is old else each for each in self._order]
        for buffer in self._buffers:
            if buffer.holder is old:
                buffer.holder = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Fetch blocks ahead inside the context. All ranks enter it alike."""
        largest = max((shared.nbytes for shared in self._shared.values()), default=0)
        if [buffer.storage.nbytes for buffer in self._buffers] != [largest] * 2:
            self.free_buffers()
            self._buffers = [Buffer(self._room(largest)) for _ in range(2)]
        self._entered, self._place = [], 0
        if not self._alike():
            self._order = []
            for buffer in self._buffers:
                buffer.holder = None
        self._fetch_next()
        try:
            yield
            self._order = self._entered
            self._settle()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a peer is gone; the first failure is the error
                self._settle()
            raise

    def after_attention(self) -> None:
        """Note that an attention, with its exchanges, has been given to the device."""
        self._attentions += 1
        self._portion()

    def free_buffers(self) -> None:
        """Let go of the room for blocks until the next call."""
        self._buffers = []

    def restore(self, device: torch.device | None = None) -> None:
        """Give the model its weights back, put together, on a device or where it computes. All ranks do it."""
        self.free_buffers()
        with _plain():
            for shared in self._shared.values():
                buffer = Buffer(self._room(shared.nbytes))
                buffer.holder = shared
                self._ask(buffer, len(shared.shard))
                self._wait(buffer)
                shared.fill(buffer.storage.to(device or self._device))
        self.remove()

    def remove(self) -> None:
        """Let go of everything. The model has no weights for its blocks, until somebody fills the slots."""
        for hook in self._hooks:
            hook.remove()
        self._shared.clear()
        self._order, self._entered, self._buffers = [], [], []

    def _alike(self) -> bool:
        """Return whether all ranks expect the same blocks and hold the same ones.

        One that has loaded its model again since the last call, or left that one by an error, knows nothing of it, and would send
        other pieces than its peers.
        """
        holders = [buffer.holder for buffer in self._buffers]
        names = [shared.block.name if shared is not None else "" for shared in (*self._order, None, *holders)]
        known = zlib.crc32("\n".join(names).encode())
        high, low = self._ranks.largest(torch.tensor([known, -known], device=self._device)).tolist()
        return bool(high == -low)

    def _enter(self, name: str, *_: object) -> None:
        shared = self._shared.get(name)
        if shared is None:
            return
        buffer = self._holding(shared) or self._start(shared)
        if buffer is None:
            raise PlanError(f"{name} runs inside of two other blocks, and two are there at a time. {self._remedy}")
        shared.running += 1
        self._ask(buffer, len(shared.shard))
        self._wait(buffer)
        if not shared.is_whole:
            shared.check()
            shared.fill(buffer.storage)
        if not self._entered or self._entered[-1] is not shared:
            self._entered.append(shared)
            with contextlib.suppress(ValueError):  # not in the order: it may come back to it
                self._place = self._order.index(shared, self._place) + 1
        self._attentions = 0
        self._fetch_next()
        self._portion()

    def _leave(self, name: str, *_: object) -> None:
        if (shared := self._shared.get(name)) is not None:
            shared.running -= 1
            shared.attentions = self._attentions

    @property
    def _next(self) -> Buffer | None:
        """The buffer of the block that is expected next, if it has one."""
        return self._holding(self._order[self._place]) if self._place < len(self._order) else None

    def _fetch_next(self) -> None:
        """Choose a buffer for the block that is expected next, if one is free."""
        if self._place < len(self._order) and self._next is None:
            self._start(self._order[self._place])

    def _portion(self) -> None:
        """Ask for a part of the next block, so that all of it is asked for when the attentions of this one are over."""
        buffer = self._next
        if buffer is None or buffer.holder is None:
            return
        expected = self._entered[-1].attentions if self._entered else 0
        left = len(buffer.holder.shard) - buffer.fetched
        self._ask(buffer, -(-left // max(1, expected + 1 - self._attentions)))

    def _holding(self, shared: SharedBlock) -> Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.holder is shared), None)

    def _start(self, shared: SharedBlock) -> Buffer | None:
        """Give a buffer to a block; None where those of the others run."""
        free = [buffer for buffer in self._buffers if buffer.holder is None or not buffer.holder.running]
        if not free:
            return None
        expected = self._next
        buffer = next((each for each in free if each is not expected), free[0])
        self._wait(buffer)
        if buffer.holder is not None:
            buffer.holder.fill(None)
        buffer.holder, buffer.fetched = shared, 0
        return buffer

    def _ask(self, buffer: Buffer, pieces: int) -> None:
        """Ask for the next pieces of the block that a buffer is for, after all that the device has been given so far."""
        shared = buffer.holder
        if shared is None:
            return
        numbers = range(len(shared.shard))[buffer.fetched : buffer.fetched + pieces]
        if not numbers:
            return
        with self._beside():
            for number in numbers:
                whole = buffer.storage[number * shared.piece : (number + 1) * shared.piece]
                own = shared.shard[number].to(self._device, non_blocking=True)
                buffer.pending.append(self._ranks.gather_parts(own, whole))
        buffer.fetched = numbers.stop
        if not self._beside_others:
            self._wait(buffer)

    def _wait(self, buffer: Buffer) -> None:
        pending, buffer.pending = buffer.pending, []
        for each in pending:
            each.wait()

    def _settle(self) -> None:
        """End the call: nothing is on its way, no block runs, and none has weights that somebody could change.

        Contents of the buffers stay there.
        """
        for shared in self._shared.values():
            shared.running = 0
        for buffer in self._buffers:
            if buffer.holder is not None:
                buffer.holder.fill(None)
                if buffer.fetched < len(buffer.holder.shard) or buffer.pending:
                    buffer.holder = None
        for buffer in self._buffers:
            self._wait(buffer)

    def _room(self, nbytes: int) -> Tensor:
        """Allocate memory for a block."""
        with _plain():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that runs on a stream of its own, after the work that the device has been given."""
        if self._stream is None:
            return contextlib.nullcontext()
        module = torch.get_device_module(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        stream: contextlib.AbstractContextManager[object] = module.stream(self._stream)
        return stream
