"""Trains the model that draws digits, from nothing: `make train-demo`.

    python benchmarks/digits/train.py [--steps 2400] [--out benchmarks/digits]

Flow matching on scikit-learn's digits. Each process has one core and a part of the batch; they add up their gradients. It computes
in bfloat16 where that is faster than float32: processors without instructions for it take three times as long.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import timeit
from pathlib import Path

import torch
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from digits import data, network, page

RATE = 2e-3
CROPS, CROP = 16, 4  # per step, of 4 × 4 digits; later a quarter as many pages
WARMUP, DECAY, PAGES = 0.01, 0.4, 0.4
"""Parts of the steps: until the rate is reached; for its descent to zero, and with whole pages, at the end."""
SHIFT, SPREAD = 1.15, 1.2
"""Of the logits of times; ComfyUI shifts Flux' times by as much."""
BLANK = 0.1
"""Pages, and rows of others, whose text has no digit: what CFG compares with."""
KEEP = 0.998
"""Of the average of weights, from step to step."""


def batch(tokens: Tensor, labels: Tensor, count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Crops of pages, `side` × `side` digits, all at one place: image tokens [count, …, 64], texts, and places.

    Args:
        tokens: of the data, [N, 4, 4, 64].
        labels: their digits, [N].
    """
    rows = torch.randint(0, 10, (count, page.ROWS))
    blank = (torch.rand(count, 1) < BLANK) | (torch.rand(count, page.ROWS) < BLANK)
    top, left = (int(torch.randint(0, page.ROWS - side + 1, ())) for _ in range(2))
    shown = rows[:, top : top + side, None].expand(-1, -1, side)
    shown = torch.where(blank[:, top : top + side, None], torch.randint(0, 10, shown.shape), shown)
    counts = torch.bincount(labels)
    starts = functional.pad(counts.cumsum(0), (1, 0))
    chosen = labels.argsort()[starts[shown] + (torch.rand(shown.shape) * counts[shown]).long()]
    image = tokens[chosen].transpose(2, 3).flatten(1, 4)
    return image, page.encode(rows.masked_fill(blank, page.ANY)), network.places(top, left, side)


def faster_dtype() -> torch.dtype:
    """Return the dtype in which this processor multiplies faster."""
    spent = {}
    for dtype in (torch.bfloat16, torch.float32):
        one, other = torch.ones(2048, network.HIDDEN, dtype=dtype), torch.ones(network.HIDDEN, 7 * network.HIDDEN, dtype=dtype)
        spent[dtype] = min(timeit.repeat(lambda one=one, other=other: one @ other, number=3, repeat=5))
    return min(spent, key=lambda dtype: spent[dtype])


def train(rank: int, ranks: int, meeting: str, steps: int, out: Path) -> None:
    """Train as one of several processes; the first one saves."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [faster_dtype()]
    distributed.broadcast_object_list(chosen)  # the first one's decides for all
    dtype = chosen[0]
    weights, model = network.Network(), network.Network().to(dtype)
    torch.manual_seed(1 + rank)
    tokens, labels = data.tokens(), data.of_model()[1]
    average = {name: value.clone() for name, value in weights.state_dict().items()}
    sizes = [p.numel() for p in weights.parameters()]
    turned = {name for name, p in weights.named_parameters() if p.ndim == 2 and "blocks" in name and "mod" not in name}
    matrices = [p for name, p in weights.named_parameters() if name in turned]
    others = [p for name, p in weights.named_parameters() if name not in turned]
    optimisers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    recent, began = 0.0, time.monotonic()
    for step in range(1, steps + 1):
        part = step / steps
        with torch.no_grad():
            for mine, master in zip(model.parameters(), weights.parameters(), strict=True):
                mine.copy_(master)
                mine.grad = None
        side = page.ROWS if part > 1 - PAGES else CROP
        image, text, places = batch(tokens, labels, max(1, CROPS * CROP**2 // side**2 // ranks), side)
        noise = torch.randn_like(image)
        times = torch.sigmoid(SHIFT + SPREAD * torch.randn(len(image)))
        noisy = torch.lerp(image, noise, times[:, None, None])
        cos, sin = network.rope(places)
        velocity = model(noisy.to(dtype), times, text.to(dtype), (cos.to(dtype), sin.to(dtype)))
        loss = (velocity.float() - (noise - image)).pow(2).mean()
        loss.backward()
        total = torch.cat([loss.detach()[None], *(p.grad.flatten().float() for p in model.parameters())]) / ranks
        distributed.all_reduce(total)
        mean, gradient = float(total[0]), total[1:]
        gradient *= min(1.0, 1 / float(gradient.norm()))
        for parameter, part_of_it in zip(weights.parameters(), gradient.split(sizes), strict=True):
            parameter.grad = part_of_it.view_as(parameter)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = RATE * max(0.0, min(1, part / WARMUP, (1 - part) / DECAY))
            optimiser.step()
        with torch.no_grad():
            for name, value in weights.state_dict().items():
                average[name].lerp_(value, max(1 - KEEP, 1 / step))
        recent += mean / 100
        if rank == 0 and step % 100 == 0:
            print(f"{step} steps, {(time.monotonic() - began) / 60:.1f} minutes: loss {recent:.4f}", flush=True)
        if step % 100 == 0:
            recent = 0.0
        if rank == 0 and (step % 500 == 0 or step == steps):
            save_file(network.checkpoint(average), out / "digits.part")
            (out / "digits.part").replace(out / "digits.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2400, help="fewer draw less legibly")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for digits.safetensors; a later state replaces it")
    parser.add_argument("--processes", type=int, default=min(2, len(os.sched_getaffinity(0))), help="a core each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # Without these, every large tensor is a new mapping whose pages are faulted in.
    memory = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**34, "MALLOC_TOP_PAD_": 2**28}
    os.environ.update({name: str(value) for name, value in memory.items()}, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.processes, f"{folder}/meeting", options.steps, options.out)
        torch.multiprocessing.spawn(train, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
