"""What a denoise call costs besides the work of the model.

    make bench, or python benchmarks/call_overhead.py [--ranks 2] [--calls 200]

First a call around an empty forward: controller -> ranks -> controller. A real pool of CPU ranks over gloo, without ComfyUI. Every
call sends the latent and the timestep to all ranks, finds the conditioning on the workers by content, and brings back a result
of the latent's size.

Then a forward around empty attention: 19 double and 38 single blocks under Flux' plan, whose tensors are so small that what is left
is the time of the host. Hooks, notes, override, planner and exchange are real; the process group is torch's fake one, which sends
nothing, so that one process is enough. Seconds are of this thread's own processor time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import common
import torch
import torch.distributed as dist
from support.pools import small_pool
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_runtime.comfy.rank.attention import attention_override
from cp_runtime.engine.cost import AttentionShape, DegreePlanner, Rates
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.families.flux import FLUX
from cp_runtime.pool.messages import Echo
from cp_runtime.pool.tensor_cache import CallEncoder
from cp_runtime.pool.worker import Worker
from cp_runtime.pool.worker_pool import WorkerPool

# shape and dtype of latent, text, and the target in milliseconds
PAYLOADS = {
    "Flux 1024x1024": ((1, 16, 128, 128), (1, 512, 4096), 5.0),
    "Wan 14B 720p, 81 frames": ((1, 16, 21, 90, 160), (1, 512, 4096), 25.0),
}
DOUBLE, SINGLE = 19, 38  # blocks of Flux
BLOCKS = DOUBLE + SINGLE
HEADS, HEAD_DIM = 4, 8
STOCK = "without the plan"
RATES = Rates(latency=1e-9, bandwidth=1e9, flops=1e11, memory=1e3, overlap=0.0)  # merging is so slow that Ulysses is chosen


def measure(pool: WorkerPool, latent: tuple[int, ...], text: tuple[int, ...], calls: int, device: str = "cpu") -> list[float]:
    """Seconds of every call, after the one that delivers the conditioning. `device`: of the UI process."""
    encoder, context = CallEncoder(), torch.randn(text, dtype=torch.bfloat16, device=device)
    times = []
    for step in range(calls + 1):
        x = torch.randn(latent, dtype=torch.bfloat16, device=device)
        arguments = {"x": x, "timestep": torch.tensor([step / calls]), "context": context.clone(), "transformer_options": {}}
        began = time.perf_counter()
        value, drop, packer = encoder.encode(arguments, {"x", "timestep"})
        replies = pool.request(Echo(value=value, drop=drop), packer, timeout=60)
        encoder.delivered()
        out = pool.result(replies, x.device)
        times.append(time.perf_counter() - began)
        if not torch.equal(out, x):
            raise RuntimeError("the workers returned another latent")
    return times[1:]


def module_hook() -> Callable[[], None]:
    """What a rank does at every planned module, where it does not look for Cancel."""
    worker = Worker.__new__(Worker)
    worker.notes, worker._runs, worker.rank = cast(Any, SimpleNamespace(modules=0)), False, 0
    return worker.module_hook(0)


def empty_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, *_: Any, skip_output_reshape: bool = False, **__: Any) -> Tensor:
    """As long as its queries, `[B, heads, L, D]`, or `[B, L, heads * D]`."""
    return q if skip_output_reshape else q.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Takes what Flux' single block takes, and only attends: through the override if there is one, as ComfyUI's attention does."""

    def forward(self, x, vec, pe, attn_mask=None, modulation_dims=None, transformer_options=None):
        q = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        override = transformer_options.get("optimized_attention_override")
        if override is None:
            return empty_attention(q, q, q, HEADS)
        return override(empty_attention, q, q, q, HEADS, skip_reshape=True)


class DoubleBlock(Block):
    """Takes what Flux' double block takes."""

    def forward(
        self, img, txt, vec, pe, attn_mask=None, modulation_dims_img=None, modulation_dims_txt=None, transformer_options=None
    ):
        out = super().forward(torch.cat((txt, img), 1), vec, pe, transformer_options=transformer_options)
        return out[:, txt.shape[1] :], out[:, : txt.shape[1]]


class LastLayer(nn.Module):
    """Returns its tokens."""

    def forward(self, x, vec, modulation_dims=None):
        return x


class Flux(nn.Module):
    """The modules that Flux' plan names, called as Flux calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(DoubleBlock() for _ in range(DOUBLE))
        self.single_blocks = nn.ModuleList(Block() for _ in range(SINGLE))
        self.final_layer = LastLayer()

    def forward(self, img, txt, vec, pe, transformer_options):
        options = {"vec": vec, "pe": pe, "attn_mask": None, "transformer_options": transformer_options}
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, **options)
        x = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            x = block(x, **options)
        return self.final_layer(x[:, txt.shape[1] :], vec)


@contextlib.contextmanager
def forwards(device: torch.device) -> Iterator[dict[str, Callable[[], Tensor]]]:
    """The forward without the plan, with it on one rank, where attention stays local, and on one of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model, on_module = Flux(), module_hook()
    installed, settings = InstalledPlan(model, FLUX), SequenceSettings()
    channels = HEADS * HEAD_DIM
    arguments = {
        "img": torch.randn(1, 64, channels, device=device),
        "txt": torch.randn(1, 16, channels, device=device),
        "vec": torch.randn(1, channels, device=device),
        "pe": torch.randn(1, 1, 80, HEAD_DIM // 2, 2, 2, device=device),
    }

    def sharded(mesh: SequenceMesh) -> Tensor:
        with installed.call(mesh, DegreePlanner(settings, mesh.size, RATES), on_module) as call:
            options = {"optimized_attention_override": attention_override(call)}
            out: Tensor = installed.forward(model.forward, **arguments, transformer_options=options)
            return out

    try:
        with torch.no_grad():  # as ranks do
            yield {
                STOCK: lambda: model.forward(**arguments, transformer_options={}),
                "one rank, attention local": lambda: sharded(SequenceMesh(None)),
                "two ranks, Ulysses": partial(sharded, SequenceMesh(dist.group.WORLD)),
            }
    finally:
        dist.destroy_process_group()


def host_seconds(run: Callable[[], Any], calls: int) -> float:
    """Median processor time of this thread for one run."""
    run()
    times = []
    for _ in range(calls):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def measure_parts(calls: int) -> None:
    """Show what the planner takes of an attention, the notes of a module, and all hooks of a forward."""
    shape, on_module = AttentionShape(1, 4608, 4608, 24, 24, 128, 2), module_hook()

    def plan() -> None:
        planner = DegreePlanner(SequenceSettings(), 2, RATES)
        for _ in range(BLOCKS):
            planner(shape)

    def note() -> None:
        for _ in range(BLOCKS):
            on_module()

    planner, noting = (1e6 * host_seconds(run, calls) / BLOCKS for run in (plan, note))
    common.show("parts", planner_us_per_attention=planner, notes_us_per_module=noting)
    with forwards(torch.device("cpu")) as runs:
        seconds = {name: host_seconds(run, calls) for name, run in runs.items()}
    stock = seconds.pop(STOCK)
    common.show(f"{DOUBLE} double and {SINGLE} single blocks around empty attention, {STOCK}", ms=1e3 * stock)
    for name, each in seconds.items():
        common.show(name, ms_more_per_call=1e3 * (each - stock), us_more_per_block=1e6 * (each - stock) / BLOCKS)


def main() -> None:
    options = common.options(__doc__, ranks=2, calls=200)
    torch.set_num_threads(1)
    with small_pool(options.ranks) as pool:
        common.show(f"pool of {options.ranks} CPU ranks without ComfyUI", **{f"{name} s": s for name, s in pool.seconds.items()})
        for name, (latent, text, target) in PAYLOADS.items():
            ms = [1e3 * seconds for seconds in sorted(measure(pool, latent, text, options.calls))]
            median, p95 = statistics.median(ms), ms[int(0.95 * len(ms))]
            size = torch.Size(latent).numel() * 2 / 1e6
            common.show(
                name, latent_MB_each_way=size, median_ms=median, percentile_95_ms=p95, target_ms=target, ratio=median / target
            )
    measure_parts(options.calls)


if __name__ == "__main__":
    main()
