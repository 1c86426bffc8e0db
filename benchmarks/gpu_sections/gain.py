"""What several GPUs gain, and whether the picture stays the same: the first section of a stranger's report.

A whole Flux with random weights, in bfloat16 or, on GPUs with less than 40 GB, in float8, 1,024 × 1,024, through a server: seconds
per step of the stock graph and of every way to share it, and the latent's root mean square difference from the stock graph's,
relative to its standard deviation. `rounding`: in a smaller Flux, the distance to float32 relative to that of the stock graph in
bfloat16.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
from functools import partial
from typing import Any

import torch
from support import checkpoints
from support.architectures import Flux
from support.graphs import flux_prompt

from .section import NEEDS_SEVERAL, Section
from .server import Server, new_models

STEPS = 6
SIZES = "hidden", "double_blocks", "single_blocks"
WHOLE_FLUX, SMALL_FLUX, TINY_FLUX = (3072, 19, 38), (3072, 3, 6), (512, 1, 2)
ROOM = 40e9  # bytes of a GPU from which on a whole one in bfloat16 fits beside its activations; in float8 it does in half of it
SAME = 0.02  # times CFG, which multiplies it: in bfloat16 two runs of the stock graph differed by 0.006 on a GPU
QUESTIONS = "name,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm,clocks.max.sm,power.draw,power.limit"
TIMEOUT = 240.0  # seconds of a prompt: ranks read 24 GB first


def gain(section: Section) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        section.add("gain of several GPUs", NEEDS_SEVERAL)
        return
    links(section)
    models = new_models()
    least = min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    size = TINY_FLUX if section.rehearse else WHOLE_FLUX
    dtype = torch.bfloat16 if least >= ROOM else torch.float8_e4m3fn
    needed = dtype.itemsize * sum(math.prod(each.shape) for each in Flux(**dict(zip(SIZES, size, strict=True))).tensors())
    free = shutil.disk_usage(models).free
    if free < needed:
        size = SMALL_FLUX
    section.add("model", blocks=f"{size[1]} + {size[2]}", dtype=str(dtype), GB=needed / 1e9, GB_free_in_temporary_folder=free / 1e9)
    checkpoints.write_flux("gain", models, *size, dtype=dtype)
    side = 256 if section.rehearse else 1024
    graph = partial(flux_prompt, node="CPSampler", ckpt="gain", width=side, height=side, tokens=256, steps=STEPS)
    with Server(section, models, *(("--bf16-unet",) if dtype == torch.bfloat16 else ())) as server:
        for cfg in (1.0, 4.0):
            stock, before = server.measured(graph(cfg=cfg), TIMEOUT)
            alone = min(server.step_seconds(before))
            section.add(f"stock, CFG {cfg:g}", seconds_per_step=alone)
            for name, cp in ways(count, cfg).items():
                with section.part(name):
                    latent, result = server.measured(graph(cfg=cfg, cp=cp), TIMEOUT)
                    seconds, report = min(server.step_seconds(result)), result.report
                    off = ((latent - stock).square().mean().sqrt() / stock.std()).item()
                    section.check(
                        f"{name}, CFG {cfg:g}", off <= SAME * cfg, gain=alone / seconds, seconds_per_step=seconds, difference=off,
                        degrees=report["degrees"], waiting=report["communication_share"], shares=report.get("shares") or "equal",
                    )  # fmt: skip
    if section.rehearse or section.few:
        return
    checkpoints.write_flux("rounding", models, *SMALL_FLUX)
    small = partial(flux_prompt, ckpt="rounding", width=512, height=512, tokens=256, steps=STEPS)
    with Server(section, models, "--fp32-unet") as server:
        exact, _ = server.measured(small(), TIMEOUT)
    with Server(section, models, "--bf16-unet") as server:
        server.compare_rounding("rounding", small(), small(cp={"world_size": count}), exact)


def ways(count: int, cfg: float) -> dict[str, dict[str, Any]]:
    """Return inputs of CP Config by name: as users get it on 2, 4, ... devices, and each way by itself on all."""
    found: dict[str, dict[str, Any]] = {f"{n} ranks": {"world_size": n} for n in (2, 4, 8) if n <= count}
    found[f"{count} ranks"] = {"world_size": count}
    if cfg == 1.0:
        found |= {f"{count} ranks, {kind}": {"world_size": count, f"{kind}_degree": count} for kind in ("ulysses", "ring")}
    return found


def links(section: Section) -> None:
    """Report what `nvidia-smi` says of cards and of what is between them."""
    for name, options in {"cards": (f"--query-gpu={QUESTIONS}", "--format=csv,noheader"), "topology": ("topo", "-m")}.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # not everywhere
            said = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True).stdout
            section.add(name, said=[line.strip() for line in said.splitlines() if line.strip()][:24])
