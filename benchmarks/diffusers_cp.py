"""diffusers' own context parallelism on CPU ranks over gloo, and the clock and the meters that compare it with this package.

diffusers 0.42.1 is written for accelerators. What it needs here, all of it patched at run time and nothing in its files:

1. `torch.accelerator.device_count`, by which `enable_parallelism` divides, is 0 without an accelerator. It becomes the world size.
2. `torch.accelerator.current_accelerator`, where the "anything" modes gather sizes, is what torch was built for. It becomes cpu.
3. Ring attention needs a kernel that returns the log-sum-exp, and the `native` backend has none. Only where it would raise for that
   reason, its forward op calls the kernel that `scaled_dot_product_attention` runs on CPU, which returns both: no copy, no extra
   pass over the data, and the same speed as `scaled_dot_product_attention`.

Everything else is diffusers' code as released: its entry point, collectives, copies and merging. Both packages attend with that one
CPU kernel, so a difference comes from what happens around it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from support.live_bytes import LiveBytes
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
QUIET, PATIENCE = 0.05, 4  # cores that other processes may use in a round; rounds per round wanted
CLOCK_SECONDS = 0.02  # two ticks of the kernel's account of the machine
BACKEND = attention_dispatch.AttentionBackendName.NATIVE
_original_forward = attention_dispatch._native_attention_forward_op


def patch() -> None:
    """Make diffusers' context parallelism run on CPU ranks. Call it once the process group exists."""
    world, cpu = dist.get_world_size(), torch.device("cpu")
    torch.accelerator.device_count = lambda: world
    torch.accelerator.current_accelerator = lambda check_available=False: cpu
    attention_dispatch._native_attention_forward_op = _forward_with_lse


def _forward_with_lse(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *arguments: Any, **keywords: Any
) -> Any:
    """The native backend's forward op, for `[batch, tokens, heads, dim]`; with the log-sum-exp where ring attention asks for it."""
    dropout_p, is_causal, scale, enable_gqa, return_lse = arguments
    if not return_lse:
        return _original_forward(ctx, query, key, value, attn_mask, *arguments, **keywords)
    if enable_gqa:
        raise ValueError("grouped heads are not part of this comparison")
    if keywords["_save_ctx"]:  # as the original does
        ctx.save_for_backward(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


@cache
def context_parallel_config(ring: int, ulysses: int, anything: bool = False) -> ContextParallelConfig:
    """diffusers' settings for `ring` x `ulysses` CPU ranks."""
    return ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ring_anything=anything and ring > 1,
        ulysses_anything=anything and ulysses > 1,
        mesh=dist.device_mesh.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")),
    )


@cache
def parallel_config(ring: int, ulysses: int, anything: bool = False) -> ParallelConfig:
    """The same, set up as `enable_parallelism` does it, for attention without a model."""
    context_parallel = context_parallel_config(ring, ulysses, anything)
    config = ParallelConfig(context_parallel_config=context_parallel)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=context_parallel.mesh)
    return config


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, as allocators of accelerators do.

    By default glibc hands large buffers back, and the kernel clears their pages anew at every use. That costs one process, whose
    buffers are largest, a tenth of its time, so scaling would look better than it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True)
class Times:
    """Seconds of every repetition of one variant, each the slowest rank's, and the cores that other processes used meanwhile."""

    seconds: tuple[float, ...]
    others: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: Times) -> tuple[float, float, float]:
        """How many times as long this takes as `other`: ratio of the medians, and the quartiles of the ratios within one round."""
        low, _, high = statistics.quantiles((a / b for a, b in zip(self.seconds, other.seconds, strict=True)), n=4)
        return self.median / other.median, low, high


def alternate(variants: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, Times]:
    """Time variants in turn: all of them in every round, in the opposite order every second round.

    So each variant meets the same load and neighbours as its rivals. Ranks start together, and the slowest counts. A round in
    which other processes were busy is repeated, at most `PATIENCE` rounds for every one wanted; then the least disturbed count.
    Call each variant once before: the first call makes buffers and connections.
    """
    rounds: list[tuple[float, dict[str, float]]] = []
    names = list(variants)
    while len(rounds) < PATIENCE * repetitions and sum(others <= QUIET for others, _ in rounds) < repetitions:
        seconds = {}
        load = _OtherLoad()
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            result = variants[name]()
            elapsed = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            del result  # or the next variant would find less memory in the allocator than this one
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            seconds[name] = elapsed.item()
        rounds.append((load.cores(), seconds))
        names.reverse()
    rounds = sorted(rounds, key=lambda item: item[0])[:repetitions]
    others = statistics.mean(cores for cores, _ in rounds)
    return {name: Times(tuple(seconds[name] for _, seconds in rounds), others) for name in variants}


class _OtherLoad:
    """How many cores everything but the ranks keeps busy, this machine's host included."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), self._machine(), time.process_time()

    def cores(self) -> float:
        """The mean since this was made, the same on every rank; small differences of the clocks count as nothing."""
        own = torch.tensor(time.process_time() - self._own, dtype=torch.float64)
        dist.all_reduce(own)
        seconds = self._machine() - self._busy - own.item()
        cores = torch.tensor(max(0.0, seconds - CLOCK_SECONDS) / (time.perf_counter() - self._wall), dtype=torch.float64)
        dist.broadcast(cores, 0)
        return cores.item()

    @staticmethod
    def _machine() -> float:
        times = psutil.cpu_times()
        return times.user + times.nice + times.system + getattr(times, "steal", 0.0)


def peak_extra_bytes(call: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """Most bytes that `call` held at one time beyond `inputs` and its result; the rank that held most counts.

    Sees what operators return, those of torch.distributed included. Does not see what lives within one operator: the attention
    kernel's scratch memory, and what gloo stages. Those are the same code in all variants, except that gloo stages more for an
    all-gather than for an all-to-all.
    """
    meter = LiveBytes(inputs)
    with meter:
        out = call()
    extra = torch.tensor(meter.peak - out.untyped_storage().nbytes())
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return int(extra)
