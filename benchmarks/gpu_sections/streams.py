"""Every mode with ranks that are threads, each on a stream of its own (`threads.py`), and whether attention waits for the device.

A wait of the host inside attention costs time in every block; torch raises where it would happen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from support.package import load_package
from torch import Tensor

from .options import Options
from .results import Results
from .threads import Carrier, Room, ThreadMesh

load_package()

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.config import ContextParallelConfig, SequenceSettings
from cp_runtime.engine.sharding import JointLayout

MODES = {
    "Ulysses": (1, 0, "allgather"),
    "ring alltoall": (0, 1, "alltoall"),
    "ring allgather": (0, 1, "allgather"),
    "unified alltoall": (2, 2, "alltoall"),
}
"""Ring and Ulysses degree, 0 being the number of ranks."""
HEADS, HEAD_DIM = 6, 128
BOUND = 2e-5
WORLDS = (2, 3, 4)


def run(options: Options, results: Results) -> None:
    """A result per number of ranks and mode, and one more on waits of the host."""
    lengths = (5, 96) if options.rehearse else (77, 1024)
    rounds = 2 if options.rehearse or options.few else 10
    for world in WORLDS[:1] if options.few else WORLDS:
        for mode, (ring, ulysses, method) in MODES.items():
            if (ring or world) * (ulysses or world) != world:
                continue
            name = f"{world} threads, {mode}"
            config = SequenceSettings(rotate_method=method).with_degrees(ring or world, ulysses or world)
            with results.part(name), _ranks(world, lengths, config, options.device) as attend:
                largest = max(attend() for _ in range(rounds))
                results.check(name, largest <= BOUND, rounds=rounds, largest=largest)
                with results.part(f"{name}, no wait of the host"), _no_waits():
                    attend(compare=False)
                    results.add(f"{name}, no wait of the host")


@contextlib.contextmanager
def _ranks(world: int, lengths: tuple[int, ...], config: ContextParallelConfig, name: str) -> Iterator[Callable[..., float]]:
    """A function that attends on all ranks and returns the largest difference to one process."""
    device, room, layout = torch.device(name), Room(), JointLayout(lengths, world)
    whole = [torch.randn(1, sum(lengths), HEADS, HEAD_DIM, device=device) for _ in range(3)]
    q, k, v = (tensor.transpose(1, 2) for tensor in whole)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    carriers = [Carrier(device, seed) for seed in range(world)]
    meshes = [ThreadMesh(room, carrier, world, rank) for rank, carrier in enumerate(carriers)]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(world)]
    if device.type == "cuda":
        torch.cuda.synchronize()

    def rank_attends(rank: int) -> Tensor:
        stream = contextlib.nullcontext() if streams[rank] is None else torch.cuda.stream(streams[rank])
        with torch.inference_mode(), stream:
            local = [layout.take_local(tensor, rank, 1) for tensor in whole]
            return context_parallel_attention(*local, mesh=meshes[rank], config=config, q_layout=layout)

    def attend(compare: bool = True) -> float:
        outs = list(threads.map(rank_attends, range(world)))
        if not compare:
            return 0.0
        if device.type == "cuda":
            torch.cuda.synchronize()
        return max((out - layout.take_local(exact, rank, 1)).abs().max().item() for rank, out in enumerate(outs))

    with ThreadPoolExecutor(world) as threads:
        try:
            yield attend
        finally:
            for carrier in carriers:
                carrier.close()


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
