"""A real ComfyUI server for the sections, on machines that lack its front end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support import preloaded
from support.package import ROOT
from support.server import DETECTION, ComfyServer, Result
from torch import Tensor

from .options import Options

TIMEOUT = 90.0  # seconds of a prompt; the section's own limit is shorter where it must be


def start(options: Options, models: Path, *arguments: str, env: Mapping[str, str] | None = None) -> ComfyServer:
    """A server to be used in a with statement. On a GPU float32 is float32: without TF32, as on the CPU."""
    page = models / "front" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("<html></html>")
    path = os.pathsep.join(filter(None, (str(DETECTION), os.environ.get("PYTHONPATH", ""))))
    return ComfyServer(
        options.comfyui,
        models=models,
        args=["--front-end-root", str(page.parent), "--use-pytorch-cross-attention", *arguments],
        env={"PYTHONPATH": path, "NVIDIA_TF32_OVERRIDE": "0", **(env or {})},
        cpu=options.rehearse,
    )


def write_families(options: Options, models: Path, names: Sequence[str]) -> None:
    """Write the tiny checkpoints of `support.families`.

    Raises:
        RuntimeError: with the errors of those that could not be built.
    """
    out = models / "diffusion_models"
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(options.comfyui), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = preloaded.run(["-m", "support.models", str(out), *names], cwd=ROOT / "tests", env=environment)
    if done.returncode or done.stdout.splitlines()[-1] != "{}":
        raise RuntimeError(f"tiny models: {done.stderr[-300:]} {done.stdout[-300:]}")


def sample(server: ComfyServer, prompt: Mapping[str, Any]) -> tuple[Tensor, Result]:
    """Run a prompt that must succeed; its latent, in float32."""
    result = server.run(prompt, timeout=TIMEOUT).check()
    return server.latent(result).float(), result


def largest(out: Tensor, expected: Tensor) -> float:
    """Difference, relative to the standard deviation of what was expected."""
    return ((out - expected).abs().max() / expected.std()).item()


def used_device_memory(options: Options) -> float:
    """GB of the device that are taken, by all processes; 0 on the CPU."""
    if options.rehearse:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9
