"""One attention layer: this package's context parallelism against diffusers' own, on CPU ranks over gloo.

    make bench, or python benchmarks/attention.py [--quick] [--ranks 2 4] [--tokens 1024 4096]

Both run in the same processes, one thread each, in alternation; the result of both is checked against one process first. In long
sequences the attention kernel, which is the same for both, takes nearly all of the time. Where there are fewer cores than ranks,
ranks wait for cores, and a row shows overhead, not scaling.

s: seconds, median; a repetition is as long as its slowest rank takes.
diffusers / ours: of those seconds, above 1 if ours is faster; in brackets the quartiles of that ratio within single rounds.
MB: peak memory beyond inputs and output on the rank that needs most; what it does not see: `peak_extra_bytes`.
sent: what one rank of ours sends in one call.
others: cores that other processes kept busy meanwhile. Numbers are worth little where that is not near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import common
import diffusers_cp
import torch
import torch.distributed as dist
from alternating import alternate, check, keep_freed_memory
from diffusers.models.attention_dispatch import dispatch_attention_fn
from support.live_bytes import LiveBytes
from support.ranks import report, worst
from torch import Tensor

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout

HEADS, HEAD_DIM = 8, 64
REPETITIONS = {1024: 31, 4096: 9}
TOLERANCE = 1e-4
# mode -> (ring degree, ulysses degree), for a world size
MODES = {
    "ulysses": lambda world: (1, world),
    "ulysses anything": lambda world: (1, world),
    "ring": lambda world: (world, 1),
    "ring anything": lambda world: (world, 1),
    "unified": lambda world: (2, world // 2),
}


class Layer:
    """One attention over the tokens of all ranks, by both packages.

    Attributes:
        expected: what one process makes of it, `[B, S, H, D]`; of this rank's queries.
    """

    def __init__(self, tokens: int, mesh: SequenceMesh) -> None:
        torch.manual_seed(tokens)
        whole = [torch.randn(1, tokens, HEADS, HEAD_DIM) for _ in range(3)]
        self._mesh, self._layout = mesh, JointLayout((tokens,), mesh.size)
        self.local = [self._layout.take_local(tensor, mesh.rank, 1) for tensor in whole]
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.local[0], *whole[1:]))
        self.expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def ours(self, ring: int, ulysses: int, **settings: Any) -> Callable[[], Tensor]:
        """Return a call of this package's; `settings` are those of a sequence."""
        config = SequenceSettings(**settings).with_degrees(ring, ulysses)
        return partial(context_parallel_attention, *self.local, q_layout=self._layout, mesh=self._mesh, config=config)

    def theirs(self, ring: int, ulysses: int, anything: bool = False) -> Callable[[], Tensor]:
        """Return a call of diffusers'."""
        config = diffusers_cp.parallel_config(ring, ulysses, anything)
        return partial(dispatch_attention_fn, *self.local, backend=diffusers_cp.BACKEND, parallel_config=config)


def measure(mode: str, tokens: int, repetitions: int) -> None:
    """Check, weigh and time one mode; report a row for each of our methods."""
    world, mesh = dist.get_world_size(), SequenceMesh(dist.group.WORLD)
    ring, ulysses = MODES[mode](world)
    anything = mode.endswith("anything")
    tokens += anything  # odd, so that no world size divides it
    layer, methods = Layer(tokens, mesh), ("alltoall", "allgather") if ring > 1 else ("allgather",)
    variants = {"diffusers": layer.theirs(ring, ulysses, anything)}
    variants |= {method: layer.ours(ring, ulysses, rotate_method=method) for method in methods}
    extra, sent = {}, {}
    for name, call in variants.items():
        mesh.stats.reset()
        check(f"{mode}, {tokens} tokens, {name}", call(), layer.expected, TOLERANCE)
        sent[name] = mesh.stats.bytes_sent / 1e6
        extra[name] = peak_extra_bytes(call, layer.local) / 1e6
    times = alternate(variants, repetitions)
    for method in methods:
        (ratio, *quartiles), memory = times["diffusers"].over(times[method]), extra[method] / extra["diffusers"]
        report(
            name=f"{world} ranks, {mode}{f', {method}' if ring > 1 else ''}, {tokens} tokens",
            ratios={"diffusers / ours": ratio, "memory ours / diffusers": memory},
            quartiles=(ratio, *quartiles),
            s_diffusers=times["diffusers"].median,
            s_ours=times[method].median,
            MB_diffusers=extra["diffusers"],
            MB_ours=extra[method],
            sent_MB=sent[method],
            others=times[method].others,
        )


def peak_extra_bytes(call: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """Most bytes that `call` held at one time beyond `inputs` and its result; the rank that held most counts.

    Sees what operators return, those of torch.distributed included. Does not see what lives within one operator: the attention
    kernel's scratch memory, and what gloo stages. Those are the same code in all variants, except that gloo stages more for an
    all-gather than for an all-to-all.
    """
    meter = LiveBytes(inputs)
    with meter:
        out = call()
    return int(worst(meter.peak - out.untyped_storage().nbytes()))


@torch.inference_mode()
def rank_main(modes: Sequence[str], tokens: int, repetitions: int) -> None:
    diffusers_cp.patch()
    keep_freed_memory()
    for mode in modes:
        measure(mode, tokens, repetitions)


def main() -> None:
    options = common.options(
        __doc__,
        "the shorter sequence and few repetitions: a minute",
        ranks=[2, 4],
        tokens={"type": int, "nargs": "+", "help": f"default: {' '.join(map(str, REPETITIONS))}"},
        modes={"nargs": "+", "choices": MODES, "default": list(MODES)},
        repetitions={"type": int, "help": "default: more of the shorter ones"},
    )
    common.show("attention", **common.machine(), heads=HEADS, head_dim=HEAD_DIM, dtype="float32", threads_per_rank=1)
    for world in options.ranks:
        for tokens in options.tokens or list(REPETITIONS)[: 1 if options.quick else None]:
            modes = [mode for mode in options.modes if mode != "unified" or world >= 4]
            repetitions = options.repetitions or (5 if options.quick else REPETITIONS.get(tokens, 5))
            common.show_ranks(__file__, world, modes=modes, tokens=tokens, repetitions=repetitions)


if __name__ == "__main__":
    common.run(main, rank_main)
