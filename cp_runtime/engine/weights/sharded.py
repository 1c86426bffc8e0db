"""Blocks whose weights are sharded over the ranks, and gathered while they run.

The bytes of a block's weights are one run (`packing`), cut into pieces, and each piece into one part per rank. An all-gather puts a
piece together in a *buffer*; the block's parameters are views of that. There are two buffers: while one block runs, the next one is
fetched, in the order of the last call, in one portion per attention of the block and one more. So fetching and the attention's
exchanges do not compete for the link: a portion starts behind an attention, and overlaps with the work after it, where ranks may
send two messages at a time (`RankGroup.may_overlap`).

Every rank enters the same blocks in the same order, so all of them send the same pieces.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...errors import PlanError
from ...pinned import pinned_zeros
from ..ranks.collectives import Pending, RankGroup
from .blocks import Block, blocks_of
from .packing import ALIGNMENT, Packing, round_up

PIECES = 8  # of a block: a portion behind each attention is a whole number of them
SMALLEST_PIECE = 4 << 20  # bytes


class ShardedBlock:
    """A block of which this rank keeps a shard.

    Args:
        block: has its weights in its slots.
        weights: used instead of those, for example with a LoRA in them; they may lie anywhere.
        on_host: keep the shard in the host's memory.

    Attributes:
        buffer: the buffer of the gathered weights, or None.
        fetched: number of pieces requested.
        pending: pieces in flight.
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
        self.buffer: Tensor | None = None
        self.fetched = 0
        self.pending: list[Pending] = []
        self.running = 0
        self.is_whole = True  # its slots have its weights
        self._remedy = remedy
        with _plain():
            self._absent = self.packing.absent(device, list(block.slots), remedy)
        self._put = block.weights  # contents of the slots, unless other code has put another weight there
        self.fill(None)

    def check(self) -> None:
        """Raise PlanError if other code has put a weight into the block, which would be lost."""
        for path, weight, put in zip(self.block.slots, self.block.weights, self._put, strict=True):
            if weight is not put:
                raise PlanError(f"{path} was replaced while every rank keeps a part of what it was. {self._remedy}")

    def fill(self, run: Tensor | None) -> None:
        """Fill the slots from a run of bytes, or with stand-ins if there is none. Weights from other code stay."""
        with _plain():
            new = self._absent if run is None else self.packing.views(run)
            ours = [weight is put for weight, put in zip(self.block.weights, self._put, strict=True)]
            self.block.put([made if own else other for made, own, other in zip(new, ours, self.block.weights, strict=True)])
            self._put = [now if own else put for now, own, put in zip(self.block.weights, ours, self._put, strict=True)]
        self.is_whole = run is not None


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Make tensors inside the context of the kind of weights (see Block), usable in every mode, whichever the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class ShardedWeights:
    """The weights of a model's blocks, sharded over ranks.

    Only blocks passed to `keep` are sharded. From then on every rank must run the model alike.

    Args:
        model: any module, in eval mode.
        ranks: share the weights. Nobody else sends on their process group.
        device: where the model computes.
        on_host: keep the shards in the host's memory. A call then copies them from there.
        remedy: advice for a user whose model cannot run like this; part of messages.
    """

    def __init__(
        self, model: nn.Module, ranks: RankGroup, device: torch.device, *, on_host: bool = False, remedy: str = ""
    ) -> None:
        self.blocks = {block.name: block for block in blocks_of(model)}
        self._ranks, self._device, self._on_host, self._remedy = ranks, device, on_host, remedy
        self._sharded: dict[str, ShardedBlock] = {}
        self._buffers: list[Tensor] = []  # free ones
        self._held: list[ShardedBlock] = []  # blocks with a buffer
        self._order: list[ShardedBlock] = []  # order of blocks in the last call
        self._spans: list[int] = []  # attentions before each of them, since the block before it or the call's start
        self._entered: list[ShardedBlock] = []  # blocks of this call, and theirs
        self._passed: list[int] = []
        self._place = 0  # position in the order
        self._attentions = 0  # since the last block was entered, or the call's start
        self._in_call = False
        self._asks: Sequence[Callable[[], None]] = ()
        self._may_overlap = ranks.may_overlap
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self._hooks = []
        for block in self.blocks.values():
            # In front of the plan's, whichever came first: a rank may load its model again at any time.
            enter, leave = partial(self._enter, block.name), partial(self._leave, block.name)
            self._hooks.append(block.module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(block.module.register_forward_hook(leave))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        shards = 0 if self._on_host else sum(sharded.shard.nbytes for sharded in self._sharded.values())
        return shards + sum(buffer.nbytes for buffer in self._all_buffers)

    @property
    def _all_buffers(self) -> list[Tensor]:
        return [*self._buffers, *(sharded.buffer for sharded in self._held if sharded.buffer is not None)]

    def keep(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Keep this rank's shard of a block, and drop its weights.

        `weights`: replace some of those in its slots, by their paths in the model.
        """
        block, others = self.blocks[name], weights or {}
        taken = [others.get(path, own) for path, own in zip(block.slots, block.weights, strict=True)]
        old = self._sharded.get(name)
        new = self._sharded[name] = ShardedBlock(block, taken, self._ranks, self._device, self._on_host, self._remedy)
        self._order = [new if each is old else each for each in self._order]
        if old in self._held:
            self._evict(old)

    @contextlib.contextmanager
    def asking(self, asks: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Call functions before blocks are fetched, while active: all ranks do, and they raise where one of these has failed."""
        self._asks = asks
        try:
            yield
        finally:
            self._asks = ()

    def _ask(self) -> None:
        for ask in self._asks:
            ask()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Prefetch blocks while active. All ranks enter it alike."""
        self._ask()
        largest = max((sharded.nbytes for sharded in self._sharded.values()), default=0)
        if [buffer.nbytes for buffer in self._all_buffers] != [largest] * 2:
            self.free_buffers()
            self._buffers = [self._new_buffer(largest) for _ in range(2)]
        self._entered, self._passed, self._attentions, self._place, self._in_call = [], [], 0, 0, True
        if not self._ranks_agree():
            self._order, self._spans = [], []
            while self._held:
                self._evict(self._held[0])
        self._fetch_next()
        self._request_portion()
        try:
            yield
            self._order, self._spans = self._entered, self._passed
            self._end_call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a peer is gone; the first failure is the error
                self._end_call()
            raise
        finally:
            self._in_call = False

    def after_attention(self) -> None:
        """Note that an attention, with its exchanges, has been launched."""
        self._attentions += 1
        if not self._asks:  # else nothing is fetched before all have said that they go on
            self._request_portion()

    def free_buffers(self) -> None:
        """Drop the buffers until the next call."""
        while self._held:
            self._evict(self._held[0])
        self._buffers = []

    def restore(self, device: torch.device | None = None) -> None:
        """Gather the model's weights, on `device` or where it computes. All ranks do it."""
        self.free_buffers()
        with _plain():
            for sharded in self._sharded.values():
                sharded.buffer = buffer = self._new_buffer(sharded.nbytes)
                self._request(sharded, len(sharded.shard))
                _wait(sharded)
                sharded.fill(buffer.to(device or self._device))
                sharded.buffer = None
        self.remove()

    def remove(self) -> None:
        """Drop all state. The model's blocks have no weights until their slots are filled."""
        for hook in self._hooks:
            hook.remove()
        self._sharded.clear()
        self._order, self._spans, self._entered, self._buffers, self._held = [], [], [], [], []

    def _ranks_agree(self) -> bool:
        """Return whether all ranks expect the same blocks and hold the same ones.

        A rank that has reloaded its model since the last call, or left that call by an error, knows nothing of it, and would send
        other pieces than its peers.
        """
        names = [*(sharded.block.name for sharded in self._order), "", *(sharded.block.name for sharded in self._held)]
        known = zlib.crc32("\n".join(names).encode())
        # One collective for both ends: the largest of -x is the smallest of x, and all are equal where these meet.
        high, low = self._ranks.largest(torch.tensor([known, -known], device=self._device)).tolist()
        return bool(high == -low)

    def _enter(self, name: str, *_: object) -> None:
        sharded = self._sharded.get(name)
        if sharded is None:
            return
        if not self._in_call:
            raise PlanError(
                f"{name} runs outside of a call of the model, but its weights are put together in one only. {self._remedy}"
            )
        self._ask()
        if sharded.buffer is None and not self._assign_buffer(sharded):
            raise PlanError(f"{name} runs inside of two other blocks, and two are there at a time. {self._remedy}")
        sharded.running += 1
        self._request(sharded, len(sharded.shard))
        _wait(sharded)
        if not sharded.is_whole:
            sharded.check()
            sharded.fill(sharded.buffer)
        if not self._entered or self._entered[-1] is not sharded:
            self._entered.append(sharded)
            self._passed.append(self._attentions)
            with contextlib.suppress(ValueError):  # not in the order: it may come back to it
                self._place = self._order.index(sharded, self._place) + 1
        self._attentions = 0
        self._fetch_next()
        self._request_portion()

    def _leave(self, name: str, *_: object) -> None:
        if (sharded := self._sharded.get(name)) is not None:
            sharded.running -= 1

    @property
    def _expected(self) -> ShardedBlock | None:
        return self._order[self._place] if self._place < len(self._order) else None

    def _fetch_next(self) -> None:
        """Give a buffer to the next expected block, if there is one."""
        if (expected := self._expected) is not None and expected.buffer is None:
            self._assign_buffer(expected)

    def _request_portion(self) -> None:
        """Request a part of the next block, so that all of it is requested when it is entered, and attentions on the way there wait
        for as little of it as can be: their exchanges take the same link."""
        if (expected := self._expected) is None or expected.buffer is None:
            return
        # From counts that are the same on all ranks (blocks and attentions so far), so that peers send the same pieces.
        left = len(expected.shard) - expected.fetched
        self._request(expected, -(-left // max(1, self._spans[self._place] + 1 - self._attentions)))

    def _assign_buffer(self, sharded: ShardedBlock) -> bool:
        """Give a buffer to a block: a free one, or an idle block's, preferably not the next one's. False if all run."""
        if not self._buffers:
            idle = [held for held in self._held if not held.running]
            if not idle:
                return False
            self._evict(min(idle, key=lambda held: held is self._expected))
        sharded.buffer = self._buffers.pop()
        self._held.append(sharded)
        return True

    def _evict(self, sharded: ShardedBlock) -> None:
        """Take a block's buffer, once all its pieces in flight have arrived."""
        _wait(sharded)
        sharded.fill(None)
        self._held.remove(sharded)
        if sharded.buffer is not None:
            self._buffers.append(sharded.buffer)
        sharded.buffer, sharded.fetched = None, 0

    def _request(self, sharded: ShardedBlock, pieces: int) -> None:
        """Request the next pieces of a block with a buffer, after all work launched so far."""
        numbers = range(len(sharded.shard))[sharded.fetched : sharded.fetched + pieces]
        if not numbers or sharded.buffer is None:
            return
        # Behind all work launched so far (`_side_stream`): kernels of the buffer's last block may still read it.
        with self._side_stream():
            for number in numbers:
                whole = sharded.buffer[number * sharded.piece : (number + 1) * sharded.piece]
                own = sharded.shard[number].to(self._device, non_blocking=True)
                sharded.pending.append(self._ranks.gather_parts(own, whole))
        sharded.fetched = numbers.stop
        # Two groups of NCCL whose kernels overlap may deadlock: see `RankGroup.may_overlap`.
        if not self._may_overlap:
            _wait(sharded)

    def _end_call(self) -> None:
        """End the call: no pieces in flight, no running block, and no block with its weights.

        Complete blocks stay in their buffers.
        """
        for sharded in self._sharded.values():
            sharded.running = 0
        for sharded in list(self._held):
            if sharded.fetched < len(sharded.shard) or sharded.pending:
                self._evict(sharded)
            else:
                sharded.fill(None)

    def _new_buffer(self, nbytes: int) -> Tensor:
        with _plain():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _side_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context on a separate stream, after the work launched so far."""
        if self._stream is None:
            return contextlib.nullcontext()
        module = torch.get_device_module(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        stream: contextlib.AbstractContextManager[object] = module.stream(self._stream)
        return stream


def _wait(sharded: ShardedBlock) -> None:
    """Wait for a block's pieces in flight, also where some fail. Raises the first error."""
    error = None
    while sharded.pending:
        try:
            sharded.pending.pop(0).wait()
        except RuntimeError as failed:
            error = error or failed
    if error is not None:
        raise error
