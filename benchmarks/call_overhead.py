"""What a denoise call costs besides the forward: controller -> ranks -> controller around an empty forward.

    make bench, or python benchmarks/call_overhead.py [--ranks 2] [--calls 200]

Starts a real pool of CPU ranks over gloo, without ComfyUI. Every call sends the latent and the timestep, finds the conditioning
on the workers by content, broadcasts to all ranks and brings back a result of the latent's size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.package import load_package

load_package()

from cp_runtime.pool.config import DeviceInventory, RuntimeConfig
from cp_runtime.pool.site import WorkerSite
from cp_runtime.pool.tensor_cache import CallEncoder
from cp_runtime.pool.worker_pool import WorkerPool

# shape and dtype of latent, text, and the target in milliseconds
PAYLOADS = {
    "Flux 1024x1024": ((1, 16, 128, 128), (1, 512, 4096), 5.0),
    "Wan 14B 720p, 81 frames": ((1, 16, 21, 90, 160), (1, 512, 4096), 25.0),
}


def measure(pool: WorkerPool, latent: tuple[int, ...], text: tuple[int, ...], calls: int) -> list[float]:
    """Seconds of every call, after the one that delivers the conditioning."""
    encoder, context = CallEncoder(), torch.randn(text, dtype=torch.bfloat16)
    times = []
    for step in range(calls + 1):
        x = torch.randn(latent, dtype=torch.bfloat16)
        arguments = {"x": x, "timestep": torch.tensor([step / calls]), "context": context.clone(), "transformer_options": {}}
        began = time.perf_counter()
        message, packer = encoder.encode(arguments, {"x", "timestep"})
        replies = pool.request("echo", message, packer, timeout=60)
        encoder.delivered()
        out = pool.result(replies, torch.device("cpu"))
        times.append(time.perf_counter() - began)
        if not torch.equal(out, x):
            raise RuntimeError("the workers returned another latent")
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), world_size=options.ranks)
    pool = WorkerPool(config, WorkerSite())
    pool.start()
    try:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in pool.seconds.items())
        print(f"{options.ranks} CPU ranks; pool without ComfyUI: {parts}")
        for name, (latent, text, target) in PAYLOADS.items():
            times = sorted(measure(pool, latent, text, options.calls))
            median, p95 = 1e3 * statistics.median(times), 1e3 * times[int(0.95 * len(times))]
            size = torch.Size(latent).numel() * 2 / 1e6
            print(
                f"{name}: latent {size:.1f} MB each way, median {median:.2f} ms, 95th percentile {p95:.2f} ms, "
                f"target {target:.0f} ms, ratio {median / target:.2f}"
            )
    finally:
        pool.close()


if __name__ == "__main__":
    main()
