"""One attention layer: this package's context parallelism against diffusers' own, on CPU ranks over gloo.

    make bench, or python benchmarks/attention.py [--quick] [--ranks 2 4] [--tokens 1024 4096]

Both run in the same processes, one thread each, in alternation; the result of both is checked against one process first. In long
sequences the attention kernel, which is the same for both, takes nearly all of the time. Where there are fewer cores than ranks,
ranks wait for cores, and a row shows overhead, not scaling.

s: seconds, median; a repetition is as long as its slowest rank takes.
ratio: diffusers' seconds / ours, above 1 if ours is faster; in brackets the quartiles of that ratio within single rounds.
MB: peak memory beyond inputs and output on the rank that needs most; what it does not see: diffusers_cp.peak_extra_bytes.
sent: what one rank of ours sends in one call.
others: cores that other processes kept busy meanwhile. Numbers are worth little where that is not near zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import common
import diffusers_cp
import torch
import torch.distributed as dist
from common import note
from diffusers.models.attention_dispatch import dispatch_attention_fn
from support.ranks import finish, report, run_ranks, start
from torch import Tensor

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.config import ContextParallelConfig
from cp_runtime.engine.mesh import SequenceMesh
from cp_runtime.engine.sharding import JointLayout

HEADS, HEAD_DIM = 8, 64
REPETITIONS = {1024: 31, 4096: 9}
TOLERANCE = 1e-4
HEADER = "    S | s theirs     ours   ratio             |MB theirs    ours ours/theirs | sent MB | others"

# mode -> (ring degree, ulysses degree), for a world size
MODES = {
    "ulysses": lambda world: (1, world),
    "ulysses anything": lambda world: (1, world),
    "ring": lambda world: (world, 1),
    "ring anything": lambda world: (world, 1),
    "unified": lambda world: (2, world // 2),
}


def measure(mode: str, tokens: int, rank: int, world: int, repetitions: int) -> None:
    """Check, weigh and time one mode; report a row for each of our methods."""
    ring, ulysses = MODES[mode](world)
    anything = mode.endswith("anything")
    tokens += anything  # odd, so that no world size divides it
    torch.manual_seed(tokens)
    whole = [torch.randn(1, tokens, HEADS, HEAD_DIM) for _ in range(3)]
    layout, mesh = JointLayout((tokens,), world), SequenceMesh(dist.group.WORLD)
    local = [layout.take_local(tensor, rank, 1) for tensor in whole]
    theirs_config = diffusers_cp.parallel_config(ring, ulysses, anything)

    def theirs() -> Tensor:
        return dispatch_attention_fn(*local, backend=diffusers_cp.BACKEND, parallel_config=theirs_config)

    def ours(method: str) -> Callable[[], Tensor]:
        config = ContextParallelConfig(
            ring_degree=ring,
            ulysses_degree=ulysses,
            rotate_method=method,
            ulysses_anything=anything and ulysses > 1,
            ring_anything=anything and ring > 1,
        )
        return lambda: context_parallel_attention(*local, q_layout=layout, mesh=mesh, config=config)

    methods = ("alltoall", "allgather") if ring > 1 else ("allgather",)
    variants = {"diffusers": theirs, **{method: ours(method) for method in methods}}

    q, k, v = (tensor.transpose(1, 2) for tensor in (local[0], *whole[1:]))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    extra, sent = {}, {}
    for name, call in variants.items():
        mesh.stats.reset()
        difference = (call() - expected).abs().max()
        sent[name] = mesh.stats.bytes_sent
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{mode}, {tokens} tokens, {name}: differs from one process by {difference:.1e}")
        extra[name] = diffusers_cp.peak_extra_bytes(call, local)

    times = diffusers_cp.alternate(variants, repetitions)
    for method in methods:
        report(
            mode=f"{mode}, {method}" if ring > 1 else mode,
            tokens=tokens,
            seconds=[times["diffusers"].median, times[method].median],
            ratio=times["diffusers"].over(times[method]),
            extra=[extra["diffusers"], extra[method]],
            sent=sent[method],
            others=times[method].others,
        )


def rank_main() -> None:
    rank, world, (options,) = start()
    diffusers_cp.patch()
    diffusers_cp.keep_freed_memory()
    settings = json.loads(options)
    with torch.inference_mode():
        for mode in settings["modes"]:
            measure(mode, settings["tokens"], rank, world, settings["repetitions"])
    finish()


def main() -> None:
    options = common.options(
        __doc__,
        "the shorter sequence and few repetitions: a minute",
        ranks={"type": int, "nargs": "+", "default": [2, 4]},
        tokens={"type": int, "nargs": "+", "help": f"default: {' '.join(map(str, REPETITIONS))}"},
        modes={"nargs": "+", "choices": MODES, "default": list(MODES)},
        repetitions={"type": int, "help": "default: more of the shorter ones"},
    )
    print(f"{common.machine()}, one thread per rank")
    print(f"{HEADS} heads of {HEAD_DIM}, float32, gloo; MB = 1e6 bytes")
    for world in options.ranks:
        print(f"\n{f'{world} ranks':24}{HEADER}")
        for tokens in options.tokens or list(REPETITIONS)[: 1 if options.quick else None]:
            settings = {
                "modes": [mode for mode in options.modes if mode != "unified" or world >= 4],
                "tokens": tokens,
                "repetitions": options.repetitions or (5 if options.quick else REPETITIONS.get(tokens, 5)),
            }
            for row in run_ranks(Path(__file__), world, json.dumps(settings), timeout=1200):
                (theirs, ours), (ratio, low, high) = row["seconds"], row["ratio"]
                their_extra, our_extra, sent = (size / 1e6 for size in (*row["extra"], row["sent"]))
                name = f"attention, {world} ranks, {row['mode']}, {row['tokens']} tokens"
                note(f"{name}, diffusers / ours", ratio)
                note(f"{name}, memory ours / diffusers", our_extra / their_extra)
                print(
                    f"{row['mode']:24}{row['tokens']:5} |{theirs:9.4f}{ours:9.4f}{ratio:7.3f} ({low:.2f}-{high:.2f}) |"
                    f"{their_extra:8.2f}{our_extra:8.2f}{our_extra / their_extra:11.2f} |{sent:8.2f} |{row['others']:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    common.run(main, rank_main)
