"""Every mode with ranks that are threads, each on a stream of its own (`threads.py`), and whether attention waits for the device.

A wait of the host inside attention costs time in every block; torch raises where it would happen. Then blocks whose weights are
shared out, on the device or on the host: what is fetched beside attention arrives late, and buffers are used in turns.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.package import load_package
from torch import Tensor, nn

from .options import Options
from .results import Results
from .threads import Room, ThreadMesh

load_package()

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.config import ContextParallelConfig, SequenceSettings
from cp_runtime.engine.sharding import JointLayout
from cp_runtime.engine.weights import sharded

MODES = {
    "Ulysses": (1, 0, "allgather"),
    "ring alltoall": (0, 1, "alltoall"),
    "ring allgather": (0, 1, "allgather"),
    "unified alltoall": (2, 2, "alltoall"),
}
"""Ring and Ulysses degree, 0 being the number of ranks."""
HEADS, HEAD_DIM, BLOCKS = 6, 128, 4
BOUND = 2e-5  # of attention
BLOCKS_BOUND = 1e-4  # of all blocks: their matrix products are of other lengths
WORLDS = (2, 3, 4)
PIECE = 1 << 20  # bytes; several to a block


def run(options: Options, results: Results) -> None:
    """A result per number of ranks and mode, one more on waits of the host, and one per place of the weights."""
    lengths = (5, 96) if options.rehearse else (77, 1024)
    rounds = 2 if options.rehearse or options.few else 10
    for world in WORLDS[:1] if options.few else WORLDS:
        for mode, (ring, ulysses, method) in MODES.items():
            if (ring or world) * (ulysses or world) != world:
                continue
            name = f"{world} threads, {mode}"
            config = SequenceSettings(rotate_method=method).with_degrees(ring or world, ulysses or world)
            with results.part(name), Ranks(world, lengths, config, options.device) as ranks:
                largest = max(ranks.attend() for _ in range(rounds))
                results.check(name, largest <= BOUND, rounds=rounds, largest=largest)
                with results.part(f"{name}, no wait of the host"), _no_waits():
                    ranks.attend(compare=False)
                    results.add(f"{name}, no wait of the host")
        for place in ("device",) if options.few else ("device", "host"):
            name = f"{world} threads, weights shared out on the {place}"
            config = SequenceSettings().with_degrees(1, world)
            with results.part(name), Ranks(world, lengths, config, options.device) as ranks:
                largest = ranks.run_blocks(rounds, on_host=place == "host")
                results.check(name, largest <= BLOCKS_BOUND, rounds=rounds, largest=largest)


class Ranks:
    """Threads that share a sequence, to be used in a with statement."""

    def __init__(self, world: int, lengths: tuple[int, ...], config: ContextParallelConfig, device: str) -> None:
        self._device, self._config, self._layout, room = torch.device(device), config, JointLayout(lengths, world), Room()
        self._meshes = [ThreadMesh(room, self._device, world, rank) for rank in range(world)]
        self._streams = [torch.cuda.Stream(self._device) if self._device.type == "cuda" else None for _ in range(world)]
        self._threads = ThreadPoolExecutor(world)
        self._whole = [torch.randn(1, sum(lengths), HEADS, HEAD_DIM, device=self._device) for _ in range(3)]

    def __enter__(self) -> Ranks:
        self._finish()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for mesh in self._meshes:
            for carrier in mesh.carriers:
                carrier.close()

    def attend(self, compare: bool = True) -> float:
        """The largest difference to one process; 0 without looking."""

        def attend(rank: int) -> Tensor:
            return self._attention(rank, *(self._layout.take_local(tensor, rank, 1) for tensor in self._whole))

        outs = self._on_all(attend)
        return self._difference(outs, _attention(*self._whole)) if compare else 0.0

    def run_blocks(self, rounds: int, on_host: bool) -> float:
        """The same of calls of a model whose blocks' weights are shared out."""
        model = nn.ModuleList(Block() for _ in range(BLOCKS)).to(self._device)
        x = self._whole[0].flatten(2)
        with torch.inference_mode():
            expected = x
            for block in model:
                expected = block(expected, _attention)

        def share_out(rank: int) -> tuple[nn.ModuleList, sharded.ShardedWeights]:
            own = copy.deepcopy(model)
            weights = sharded.ShardedWeights(own, self._meshes[rank].weights, self._device, on_host=on_host)
            for name in weights.blocks:
                weights.keep(name)
            return own, weights

        def call(rank: int) -> Tensor:
            (blocks, weights), out = models[rank], self._layout.take_local(x, rank, 1)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                attended = self._attention(rank, q, k, v)
                weights.after_attention()
                return attended

            with weights.call():
                for block in blocks:
                    out = block(out, attend)
            return out

        usual, sharded.SMALLEST_PIECE = sharded.SMALLEST_PIECE, PIECE
        try:
            models = self._on_all(share_out)
            return max(self._difference(self._on_all(call), expected) for _ in range(rounds))
        finally:
            sharded.SMALLEST_PIECE = usual

    def _attention(self, rank: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, mesh=self._meshes[rank], config=self._config, q_layout=self._layout)

    def _on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """What it returns on every rank, each in its thread and on its stream."""

        def on_rank(rank: int) -> Any:
            stream = self._streams[rank]
            with torch.inference_mode(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return run(rank)

        return list(self._threads.map(on_rank, range(len(self._meshes))))

    def _difference(self, outs: list[Tensor], exact: Tensor) -> float:
        self._finish()
        local = [self._layout.take_local(exact, rank, 1) for rank in range(len(outs))]
        return max((out - own).abs().max().item() for out, own in zip(outs, local, strict=True))

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Block(nn.Module):
    """A matrix product and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return x + attend(q, k, v).flatten(2)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one process, `[B, S, H, D]`."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
