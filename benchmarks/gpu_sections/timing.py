"""What the host takes: for a call through the pool, for hooks and exchanges, and to launch a Flux block as ranks get fewer tokens.

Where the host needs longer for a block than the device, more ranks make nothing faster.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

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
    """A double block of Flux with the tokens of one rank of 1, 2, 4 and 8, its attention over those tokens alone."""
    sys.path.insert(0, str(COMFYUI))
    sys.argv = ["main.py"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy.ldm.flux.layers import DoubleStreamBlock
    from comfy.ops import disable_weight_init

    hidden, image, dtype = (256, 256, torch.float32) if section.rehearse else (3072, IMAGE, torch.bfloat16)
    place = {"dtype": dtype, "device": section.device}
    block = DoubleStreamBlock(hidden, hidden // 128, 4.0, True, **place, operations=disable_weight_init)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for ranks in SHARES[-1:] if section.few else SHARES:
        img, txt = (torch.randn(1, count // ranks, hidden, **place) for count in (image, TEXT))
        tokens = img.shape[1] + txt.shape[1]
        pe = torch.eye(2, device=section.device).expand(1, 1, tokens, 64, 2, 2)
        forward = partial(block, img=img, txt=txt, vec=torch.randn(1, hidden, **place), pe=pe)
        section.add(f"Flux block, one rank of {ranks}", tokens=tokens, **milliseconds(forward))
