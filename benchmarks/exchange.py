"""One exchange of a Flux block between CPU ranks: time of the host for tiny tensors, and seconds for large ones beside one memcpy.

    python benchmarks/exchange.py [--ranks 2] [--tokens 4352] [--repetitions 200]

host us: median of all that Ulysses does around an empty attention on tiny tensors, on the slower rank: both exchanges with their
copies and waits. work us: processor time of the same.
all_to_all ms: median for 4.2 MB to every other rank. in place ms: the same packed into shared memory and read where it lies, as
attention does. Ulysses ms: both exchanges of a block of `tokens`, with 24 heads of 128 in 16 bits. memcpy ms: one copy of the bytes
that `all_to_all` sends, on all ranks at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist
from alternating import keep_freed_memory
from support.ranks import of_all, report, worst

from cp_runtime.engine.attention.ulysses import HeadExchange
from cp_runtime.engine.ranks.collectives import RankGroup

HEADS, HEAD_DIM = 24, 128
BYTES = 4_200_000


def ulysses(group: RankGroup, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Callable[[], object]:
    """Both exchanges of an attention of which nothing else is left."""
    exchange, lengths = HeadExchange(group, heads), (tokens // group.size,) * group.size
    shape = 1, lengths[group.rank], heads, head_dim
    qkv, out = [torch.randn(shape).to(dtype) for _ in range(3)], torch.empty(shape, dtype=dtype)

    def run() -> None:
        q, _, _ = exchange.to_heads(qkv, lengths)()
        exchange.to_tokens(q, lengths, 1)(out)

    return run


def times(run: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Median seconds, of the slower rank, and median processor time of this thread."""
    wall, work = [], []
    for _ in range(repetitions):
        began, worked = time.perf_counter(), time.thread_time()
        run()
        work.append(time.thread_time() - worked)
        wall.append(time.perf_counter() - began)
    return worst(statistics.median(wall)), statistics.median(work)


def of_rank(tokens: int, repetitions: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    group = RankGroup(dist.group.WORLD)
    runs = {"host": ulysses(group, 4 * group.size, 4, 8, torch.float32)}
    counts = [BYTES] * group.size
    counts[group.rank] = 0
    send, received = (torch.ones(sum(counts), dtype=torch.uint8) for _ in range(2))
    runs["all_to_all"] = lambda: group.all_to_all(send, counts, received, counts).wait()
    shared = group.shared

    def in_place() -> None:
        made = shared.space(BYTES, torch.uint8)
        made.copy_(send[:BYTES])
        for _ in group.pass_around(shared, made, [BYTES] * group.size):
            pass

    if shared is not None:
        runs["in place"] = in_place
    runs["Ulysses"] = ulysses(group, tokens, HEADS, HEAD_DIM, torch.bfloat16)
    runs["memcpy"] = lambda: received.copy_(send)
    seconds = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        dist.barrier()
        seconds[name] = times(run, repetitions)
    wall = dict(zip(runs, of_all(tuple(seconds[name][0] for name in runs))[0], strict=True))
    if group.rank == 0:
        report(
            name=f"{group.size} ranks", host_us=1e6 * wall["host"], work_us=1e6 * seconds["host"][1],
            all_to_all_ms=1e3 * wall["all_to_all"], in_place_ms=1e3 * wall.get("in place", 0.0), memcpy_ms=1e3 * wall["memcpy"],
            ratio=wall["all_to_all"] / wall["memcpy"], in_place_ratio=wall.get("in place", 0.0) / wall["memcpy"],
            ulysses_ms=1e3 * wall["Ulysses"],
        )  # fmt: skip


def main() -> None:
    options = common.options(__doc__, ranks=[2], tokens=4352, repetitions=200)
    for ranks in options.ranks:
        common.show_ranks(__file__, ranks, tokens=options.tokens, repetitions=options.repetitions)


if __name__ == "__main__":
    common.run(main, of_rank)
