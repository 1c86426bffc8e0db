"""What the host takes: for a call through the pool, for hooks and exchanges, and to launch a Flux block as ranks get fewer tokens.

Where the host needs longer for a block than the device, more ranks make nothing faster.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import call_overhead
import torch
from support.pools import small_pool

from cp_runtime.pool.worker_pool import WorkerPool

from .section import Section, milliseconds
from .server import COMFYUI

TEXT, IMAGE = 512, 4096
SHARES = (1, 2, 4, 8)


def timing(section: Section) -> None:
    """Calls, then blocks."""
    with section.part("calls"), small_pool(2) as pool:
        _calls(section, pool, "CPU ranks", "cpu")
    with section.part("calls, ranks on the card"), small_pool(2, on="cuda", **section.ranks(2)) as pool:
        _calls(section, pool, "ranks on the card", section.device)
    with section.part("hooks and exchanges"):
        _hooks(section)
    with section.part("Flux block"):
        _blocks(section)


def _calls(section: Section, pool: WorkerPool, kind: str, device: str) -> None:
    for name, (latent, text, target) in call_overhead.PAYLOADS.items():
        times = call_overhead.measure(pool, latent, text, 10 if section.few else 50, device)
        ms = 1e3 * statistics.median(times)
        section.check(f"empty call, {name}, {kind}", section.rehearse or ms <= target, ms=ms, target_ms=target)


def _hooks(section: Section) -> None:
    """Around empty blocks and attention, with a process group that sends nothing: what a call of Flux gets on top."""
    with call_overhead.forwards(torch.device(section.device)) as runs:
        ms = {name: milliseconds(run)["host_ms"] for name, run in runs.items()}
    stock = ms.pop(call_overhead.STOCK)
    for name, each in ms.items():
        per_block = 1e3 * (each - stock) / call_overhead.BLOCKS
        section.add(f"hooks and exchanges, {name}", host_ms=each - stock, host_us_per_block=per_block)


@torch.inference_mode()
def _blocks(section: Section) -> None:
    """A double and a single block of Flux with the tokens of one rank of 1, 2, 4 and 8, attention over those tokens alone.

    `graph_ms` is a replay of the same block as a CUDA graph: what the host's launches cost is the difference to `ms`.
    """
    sys.path.insert(0, str(COMFYUI))
    sys.argv = ["main.py"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock
    from comfy.ops import disable_weight_init

    hidden, image, dtype = (256, 256, torch.float32) if section.rehearse else (3072, IMAGE, torch.bfloat16)
    place = {"dtype": dtype, "device": section.device}
    double = DoubleStreamBlock(hidden, hidden // 128, 4.0, True, **place, operations=disable_weight_init)
    single = SingleStreamBlock(hidden, hidden // 128, 4.0, **place, operations=disable_weight_init)
    for parameter in (*double.parameters(), *single.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    for ranks in SHARES[-1:] if section.few else SHARES:
        img, txt = (torch.randn(1, count // ranks, hidden, **place) for count in (image, TEXT))
        tokens = img.shape[1] + txt.shape[1]
        shared = {
            "vec": torch.randn(1, hidden, **place),
            "pe": torch.eye(2, device=section.device).expand(1, 1, tokens, 64, 2, 2),
        }
        for name, forward in {
            "double": partial(double, img=img, txt=txt, **shared),
            "single": partial(single, torch.cat((txt, img), 1), **shared),
        }.items():
            figures = milliseconds(forward) | ({} if section.rehearse else _as_graph(forward))
            good = figures.pop("same_bits", True)
            section.check(f"Flux {name} block, one rank of {ranks}", good, tokens=tokens, **figures)


def _as_graph(forward: Callable[[], Any]) -> dict[str, Any]:
    """A forward captured as a CUDA graph: the time of a replay, and whether its result has the bits of the eager one."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what libraries allocate at first use must not be captured
        expected = forward()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    replay = milliseconds(graph.replay)
    pairs = zip(*([whole] if torch.is_tensor(whole) else whole for whole in (expected, out)), strict=True)
    same = all(torch.equal(*pair) for pair in pairs)
    return {"graph_host_ms": replay["host_ms"], "graph_ms": replay["ms"], "same_bits": same}
