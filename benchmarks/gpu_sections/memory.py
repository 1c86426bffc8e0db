"""Memory with a random Flux of full width: what all processes hold together, what the device holds, and whether both come back.

Host memory is PSS: a page that N processes share counts as 1/N in each. The device's memory is what is taken on it by anybody.
Ranks share the card, so that the device holds a model per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from support import checkpoints
from support.graphs import flux_prompt
from support.processes import descendants, pss, rss
from support.server_events import Result
from torch import nn

from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.weights.sharded import ShardedWeights

from .section import Section
from .server import TIMEOUT, Server, largest, new_models, used_device_memory

FULL = checkpoints.Flux(hidden=3072, double_blocks=3, single_blocks=6)  # 3.8 GB in bfloat16
SMALL = checkpoints.Flux(hidden=768, double_blocks=2, single_blocks=4)
HOST_PER_GB = 1.6  # GB of host memory per GB of checkpoint, at most
LEFT = 1.0  # GB; what may stay on the device after /free, besides what was there before
CAP, REHEARSED_CAP = 10.0, 1.0  # GiB of the device that are left to ComfyUI where memory is short
BIG, LORA = "gpu_check", "gpu_check_lora"
PINNED = 1.25  # times their size that weights may take on the host
SETTLE = 2.0  # seconds until memory that was given back is seen


def memory(section: Section) -> None:
    """Report on every step."""
    checkpoints.CHECKPOINTS[BIG] = checkpoints.Checkpoint(architecture=SMALL if section.rehearse else FULL, repeated=True)
    checkpoints.LORAS[LORA] = checkpoints.Lora(base=BIG, seed=1)
    with section.part("pinned weights"):
        _pinned(section)
    models = new_models()
    checkpoints.write("flux", models)
    file, _ = (checkpoints.write(name, models, dtype=torch.bfloat16, file_stem=name) for name in (BIG, LORA))
    with Steps(section, models, "--bf16-unet") as server:
        server.all_steps(file.stat().st_size / 1e9)
    left = max(0.0, torch.cuda.mem_get_info()[1] / (1 << 30) - (REHEARSED_CAP if section.rehearse else CAP))
    short = ["--disable-dynamic-vram", "--reserve-vram", f"{left:.2f}"]
    for name, arguments in (("little device memory", short), ("--highvram", ["--highvram"])):
        if not section.few:
            with section.part(name), Steps(section, models, "--bf16-unet", *arguments) as server:
                server.step(f"{name}: stock", cp=None)
                server.step(f"{name}: small, then", server.side // 2)
                server.step(f"{name}: large", 2 * server.side)


def _pinned(section: Section) -> None:
    """What the host gives for blocks that are kept there, whose sizes are no powers of two, and what stays taken after them."""
    rows, device = 170 if section.rehearse else 17_000, torch.device(section.device)
    model = nn.ModuleList(nn.Linear(4096, rows, bias=False, dtype=torch.bfloat16, device=device) for _ in range(4))
    weights = ShardedWeights(model, RankGroup(None), device, on_host=True)
    size, process = sum(block.nbytes for block in weights.blocks.values()), psutil.Process()
    before = process.memory_info().rss  # what the machine calls available lags behind by seconds
    for name in weights.blocks:
        weights.keep(name)
    taken = process.memory_info().rss - before
    weights.remove()
    left = process.memory_info().rss - before
    good = section.rehearse or (taken <= PINNED * size and left <= (PINNED - 1) * size)
    section.check("pinned weights", good, MB=size / 1e6, taken_MB=taken / 1e6, left_MB=left / 1e6)


class Steps(Server):
    """A server that does one thing after the other, and notes time and memory."""

    def all_steps(self, size: float) -> None:
        """Do every step; `size` is that of the checkpoint, in GB."""
        section = self.section
        self.prompt(64, ckpt="flux")
        self.free_and_wait()
        base, device = self.host(), used_device_memory()
        section.add("server and ranks without a model", host_GB=base, device_GB=device)
        self.step("load and first prompt")
        per_gb = (self.host() - base) / size
        good = section.rehearse or per_gb <= HOST_PER_GB  # of a small one, what else the ranks need is most
        section.check("host memory per GB of checkpoint", good, GB=per_gb, checkpoint_GB=size)
        self.step("second prompt")
        self.step("LoRA", loras=[LORA])
        self.step("LoRA changed", loras=[(LORA, 0.5)])
        self.step("larger picture", 2 * self.side)
        self.step("stock graph on the same server", cp=None)
        self.step("ranks again")
        self.placements()
        peak = max(rss(worker.pid) for worker in self.workers()) / 1e9
        section.add("resident memory of the largest rank, shared pages included", GB=peak)
        self.note("/free", self.free_and_wait)
        left = used_device_memory() - device
        section.check("left after /free", left <= LEFT, device_GB=left, host_GB=self.host() - base)

    def placements(self) -> None:
        """Weights of which every rank keeps a part: the same latent, and less of the device."""
        latents, device = {}, {}
        for weights in ("whole", "sharded", "offloaded"):
            result = self.step(f"weights {weights}", cp={**self.cp, "weights": weights})
            if result is not None:
                latents[weights], device[weights] = self.latent(result), used_device_memory()
        for weights in ("sharded", "offloaded"):
            with self.section.part(f"weights {weights}"):
                difference, saved = largest(latents[weights], latents["whole"]), device["whole"] - device[weights]
                good = difference <= 1e-5 and (self.section.rehearse or saved > 0)
                self.section.check(f"weights {weights} against whole", good, difference=difference, saved_GB=saved)

    @property
    def side(self) -> int:
        """Of the pictures, in pixels."""
        return 256 if self.section.rehearse else 1024

    def step(self, name: str, side: int | None = None, **settings: Any) -> Result | None:
        """Run a prompt, as `prompt` takes it, and report on it. Returns None where it failed."""
        return self.note(name, partial(self.prompt, side, **settings))

    def note(self, name: str, act: Callable[[], Any]) -> Any:
        """Report on a step; an error of it is a result, too. Returns what the step returns."""
        with self.section.part(name):
            began = time.monotonic()
            done = act()
            seconds = time.monotonic() - began
            self.section.add(name, seconds=seconds, host_GB=self.host(), device_GB=used_device_memory())
            return done

    def prompt(self, side: int | None = None, ckpt: str = BIG, **settings: Any) -> Result:
        """Run a prompt of one step that must succeed."""
        side = side or self.side
        graph = flux_prompt(ckpt=ckpt, width=side, height=side, steps=1, **{"cp": self.cp, **settings})
        return self.run(graph, timeout=TIMEOUT).check()

    def free_and_wait(self) -> None:
        """Do what ComfyUI's button does."""
        self.free()
        time.sleep(SETTLE)

    def host(self) -> float:
        """GB that the server and the ranks hold together."""
        return sum(pss(pid) for pid in (self.pid, *(child.pid for child in descendants(self.pid)))) / 1e9
