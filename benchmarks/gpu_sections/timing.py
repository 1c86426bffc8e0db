"""What the host takes: for a call through the pool, for hooks and exchanges, and to launch a Flux block as ranks get fewer tokens.

Where the host needs longer for a block than the device, more ranks make nothing faster.
"""

from __future__ import annotations

import statistics
import sys

import call_overhead
import torch
from support.package import load_package
from support.pools import make_pool

from .clock import host_milliseconds, milliseconds
from .options import Options
from .results import Results

load_package()

from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.worker_pool import WorkerPool

TEXT, IMAGE = 512, 4096
SHARES = (1, 2, 4, 8)


def run(options: Options, results: Results) -> None:
    """Calls, then blocks."""
    with results.part("calls"):
        _calls(make_pool(2), "CPU ranks", options, results)
    with results.part("calls, ranks on the card"):
        inventory = DeviceInventory(type="cuda", count=torch.cuda.device_count())
        config = RuntimeConfig.resolve(inventory=inventory, devices=options.devices(2), backend="gloo")
        _calls(WorkerPool(config, WorkerSite()), "ranks on the card", options, results)
    with results.part("hooks and exchanges"):
        _hooks(options, results)
    with results.part("Flux block"):
        _blocks(options, results)


def _calls(pool: WorkerPool, kind: str, options: Options, results: Results) -> None:
    pool.start()
    try:
        for name, (latent, text, target) in call_overhead.PAYLOADS.items():
            times = call_overhead.measure(pool, latent, text, 10 if options.few else 50)
            ms = 1e3 * statistics.median(times)
            results.check(f"empty call, {name}, {kind}", options.rehearse or ms <= target, ms=ms, target_ms=target)
    finally:
        pool.close()


def _hooks(options: Options, results: Results) -> None:
    """Around empty blocks and attention, with a process group that sends nothing: what a call of Flux gets on top."""
    with call_overhead.forwards(torch.device(options.device)) as runs:
        ms = {name: host_milliseconds(run, options.device) for name, run in runs.items()}
    blocks, stock = call_overhead.DOUBLE + call_overhead.SINGLE, ms.pop(call_overhead.STOCK)
    for name, each in ms.items():
        results.add(f"hooks and exchanges, {name}", host_ms=each - stock, host_us_per_block=1e3 * (each - stock) / blocks)


@torch.inference_mode()
def _blocks(options: Options, results: Results) -> None:
    """A double block of Flux with the tokens of one rank of 1, 2, 4 and 8, its attention over those tokens alone."""
    sys.path.insert(0, str(options.comfyui))
    sys.argv = ["main.py"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy.ldm.flux.layers import DoubleStreamBlock
    from comfy.ops import disable_weight_init

    hidden, image = (256, 256) if options.rehearse else (3072, IMAGE)
    dtype = torch.float32 if options.rehearse else torch.bfloat16
    device = options.device
    block = DoubleStreamBlock(hidden, hidden // 128, 4.0, True, dtype=dtype, device=device, operations=disable_weight_init)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for ranks in SHARES[-1:] if options.few else SHARES:
        img, txt = (torch.randn(1, count // ranks, hidden, dtype=dtype, device=device) for count in (image, TEXT))
        pe = torch.eye(2, device=device).expand(1, 1, img.shape[1] + txt.shape[1], 64, 2, 2)
        vec = torch.randn(1, hidden, dtype=dtype, device=device)

        def forward(img=img, txt=txt, vec=vec, pe=pe) -> object:
            return block(img=img, txt=txt, vec=vec, pe=pe)

        figures = {"host_ms": host_milliseconds(forward, device), "ms": milliseconds(forward, device)}
        results.add(f"Flux block, one rank of {ranks}", tokens=img.shape[1] + txt.shape[1], **figures)
