"""Memory with a random Flux of full width: what all processes hold together, what the device holds, and whether both come back.

Host memory is PSS: a page that N processes share counts as 1/N in each. The device's memory is what is taken on it by anybody.
Ranks share the card, so that the device holds a model per rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from support import checkpoints
from support.graphs import flux_prompt
from support.package import load_package
from support.processes import pss, rss
from support.server import ComfyServer, Result
from torch import nn

from .options import Options
from .results import Results
from .server import TIMEOUT, start, used_device_memory

load_package()

from cp_runtime.engine.collectives import RankGroup
from cp_runtime.engine.weights.sharded import ShardedWeights

RANKS = 2
FULL = checkpoints.Flux(hidden=3072, double_blocks=3, single_blocks=6)  # 3.8 GB in bfloat16
SMALL = checkpoints.Flux(hidden=768, double_blocks=2, single_blocks=4)
HOST_PER_GB = 1.6  # GB of host memory per GB of checkpoint, at most
LEFT = 1.0  # GB; what may stay on the device after /free, besides what was there before
CAP, REHEARSED_CAP = 10.0, 1.0  # GiB of the device that are left to ComfyUI where memory is short
BIG, LORA = "gpu_check", "gpu_check_lora"
PINNED = 1.25  # times their size that weights may take on the host
SETTLE = 2.0  # seconds until memory that was given back is seen


def run(options: Options, results: Results) -> None:
    """A result per step."""
    architecture = SMALL if options.rehearse else FULL
    checkpoints.CHECKPOINTS[BIG] = checkpoints.Checkpoint(architecture=architecture, repeated=True)
    checkpoints.LORAS[LORA] = checkpoints.Lora(base=BIG, seed=1)
    with results.part("pinned weights"):
        _pinned(options, results)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        checkpoints.write("flux", models)
        checkpoints.write(LORA, models, dtype=torch.bfloat16, file_stem=LORA)
        file = checkpoints.write(BIG, models, dtype=torch.bfloat16, file_stem=BIG)
        size = file.stat().st_size / 1e9
        with start(options, models, "--bf16-unet") as server:
            Steps(server, options, results).run(size)
        for name, arguments in (("little device memory", _short_of_memory(options)), ("--highvram", ["--highvram"])):
            if not options.few:
                with results.part(name), start(options, models, "--bf16-unet", *arguments) as server:
                    steps = Steps(server, options, results)
                    steps.step(f"{name}: stock", lambda run=steps: run.prompt(cp=None))
                    steps.step(f"{name}: small, then", lambda run=steps: run.prompt(run.side // 2))
                    steps.step(f"{name}: large", lambda run=steps: run.prompt(2 * run.side))


def _pinned(options: Options, results: Results) -> None:
    """What the host gives for blocks that are kept there, whose sizes are no powers of two, and what stays taken after them."""
    rows, device = 170 if options.rehearse else 17_000, torch.device(options.device)
    model = nn.ModuleList(nn.Linear(4096, rows, bias=False, dtype=torch.bfloat16, device=device) for _ in range(4))
    weights = ShardedWeights(model, RankGroup(None), device, on_host=True)
    size, before = sum(block.nbytes for block in weights.blocks.values()), psutil.virtual_memory().available
    for name in weights.blocks:
        weights.keep(name)
    taken = before - psutil.virtual_memory().available
    weights.remove()
    time.sleep(SETTLE)
    left = before - psutil.virtual_memory().available
    good = options.rehearse or (taken <= PINNED * size and left <= (PINNED - 1) * size)
    results.check("pinned weights", good, MB=size / 1e6, taken_MB=taken / 1e6, left_MB=left / 1e6)


def _short_of_memory(options: Options) -> list[str]:
    left = REHEARSED_CAP if options.rehearse else CAP
    return ["--disable-dynamic-vram", "--reserve-vram", f"{max(0.0, torch.cuda.mem_get_info()[1] / (1 << 30) - left):.2f}"]


class Steps:
    """Does something, and notes time and memory."""

    def __init__(self, server: ComfyServer, options: Options, results: Results) -> None:
        self.server, self.options, self.results = server, options, results
        self.cp = {"devices": options.devices(RANKS), "backend": "gloo"}
        self.side = 256 if options.rehearse else 1024

    def run(self, size: float) -> None:
        """All steps on one server; `size` is that of the checkpoint, in GB."""
        self.prompt(64, ckpt="flux")
        self.server.free()
        time.sleep(SETTLE)
        base, device = self.host(), used_device_memory()
        self.results.add("server and ranks without a model", host_GB=base, device_GB=device)
        self.step("load and first prompt", self.prompt)
        per_gb = (self.host() - base) / size
        good = self.options.rehearse or per_gb <= HOST_PER_GB  # of a small one, what else the ranks need is most
        self.results.check("host memory per GB of checkpoint", good, GB=per_gb, checkpoint_GB=size)
        self.step("second prompt", self.prompt)
        self.step("LoRA", lambda: self.prompt(loras=[LORA]))
        self.step("LoRA changed", lambda: self.prompt(loras=[(LORA, 0.5)]))
        self.step("larger picture", lambda: self.prompt(2 * self.side))
        self.step("stock graph on the same server", lambda: self.prompt(cp=None))
        self.step("ranks again", self.prompt)
        self.shared()
        peak = max(rss(worker.pid) for worker in self.server.workers()) / 1e9
        self.results.add("resident memory of the largest rank, shared pages included", GB=peak)
        self.step("/free", self.free)
        left = used_device_memory() - device
        self.results.check("left after /free", left <= LEFT, device_GB=left, host_GB=self.host() - base)

    def shared(self) -> None:
        """Weights of which every rank keeps a part: the same latent, and less of the device."""
        latents, device = {}, {}
        for weights in ("whole", "sharded", "offloaded"):
            cp = {**self.cp, "weights": weights}
            self.step(f"weights {weights}", lambda cp=cp: latents.update({cp["weights"]: self.server.latent(self.prompt(cp=cp))}))
            device[weights] = used_device_memory()
        for weights in ("sharded", "offloaded"):
            with self.results.part(f"weights {weights}"):
                difference = (latents[weights] - latents["whole"]).abs().max() / latents["whole"].std()
                good = difference <= 1e-5 and (self.options.rehearse or device[weights] < device["whole"])
                saved = device["whole"] - device[weights]
                self.results.check(f"weights {weights} against whole", bool(good), difference=float(difference), saved_GB=saved)

    def step(self, name: str, act: Callable[[], Any]) -> None:
        """One result; an error of the step is one, too."""
        with self.results.part(name):
            began = time.monotonic()
            act()
            seconds = time.monotonic() - began
            self.results.add(name, seconds=seconds, host_GB=self.host(), device_GB=used_device_memory())

    def prompt(self, side: int | None = None, ckpt: str = BIG, **settings: Any) -> Result:
        """A prompt of one step that must succeed."""
        side = side or self.side
        graph = flux_prompt(ckpt=ckpt, width=side, height=side, steps=1, **{"cp": self.cp, **settings})
        return self.server.run(graph, timeout=TIMEOUT).check()

    def free(self) -> None:
        """As the button of ComfyUI."""
        self.server.free()
        time.sleep(SETTLE)

    def host(self) -> float:
        """GB that the server and the ranks hold together, and the process that they are forked from."""
        pids = [self.server.pid, *(child.pid for child in psutil.Process(self.server.pid).children(recursive=True))]
        return sum(pss(pid) for pid in pids) / 1e9
