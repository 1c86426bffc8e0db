"""A real ComfyUI server for the sections, on machines that lack its front end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support import preloaded, stand_in
from support.graphs import Prompt
from support.package import ROOT
from support.server import DETECTION, ComfyServer
from support.server_events import Result
from torch import Tensor

from .section import Section

LARGEST = 2e-4
"""Difference of latents in float32 that rounding may make, relative to their standard deviation."""
ROUNDING = 1.2
"""Times the stock result's distance to the exact one that another one in its precision may have."""
TIMEOUT = 90.0  # seconds of a prompt; the section's own limit is shorter where it must be
COMFYUI = Path(os.environ["COMFYUI_PATH"])


def start(section: Section, models: Path, *arguments: str, env: Mapping[str, str] | None = None) -> ComfyServer:
    """A server to be used in a with statement. On a GPU float32 is float32: without TF32, as on the CPU."""
    cpu = section.device == "cpu"
    page = models / "front" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("<html></html>")
    return ComfyServer(
        COMFYUI,
        models=models,
        args=["--front-end-root", str(page.parent), "--use-pytorch-cross-attention", *arguments],
        env={**_path(DETECTION), "NVIDIA_TF32_OVERRIDE": "0", **({stand_in.VARIABLE: None} if cpu else {}), **(env or {})},
        cpu=cpu,
    )


def write_models(program: str, out: Path, *names: str) -> str:
    """Have a module of `tests/support` write models; returns what it printed.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = preloaded.run(["-m", program, str(out), *names], cwd=ROOT / "tests", env={**os.environ, **_path(COMFYUI)})
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr[-300:]} {done.stdout[-300:]}")
    return done.stdout


def _path(first: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH", ""))))}


def sample(server: ComfyServer, prompt: Mapping[str, Any]) -> tuple[Tensor, Result]:
    """Run a prompt that must succeed; its latent, in float32."""
    result = server.run(prompt, timeout=TIMEOUT).check()
    return server.latent(result).float(), result


def largest(out: Tensor, expected: Tensor) -> float:
    """Difference, relative to the standard deviation of what was expected."""
    return ((out - expected).abs().max() / expected.std()).item()


def compare(server: ComfyServer, section: Section, name: str, stock: Prompt, ours: Prompt) -> Tensor | None:
    """Report on two graphs in float32. Returns the latent of the stock graph, unless it failed."""
    expected = None
    with section.part(name):
        expected, before = sample(server, stock)
        out, after = sample(server, ours)
        difference = largest(out, expected)
        good = out.shape == expected.shape and difference <= LARGEST
        section.check(name, good, largest=difference, stock_seconds=before.seconds, seconds=after.seconds)
    return expected


def compare_rounding(server: ComfyServer, section: Section, name: str, stock: Prompt, ours: Prompt, exact: Tensor) -> None:
    """Report on two graphs in another precision: the distance to the exact latent, relative to that of the stock one."""
    with section.part(name):
        theirs, out = sample(server, stock)[0], sample(server, ours)[0]
        ratio = over_stock(out, theirs, exact)
        section.check(name, ratio <= ROUNDING, rms_over_stock=ratio)


def over_stock(out: Tensor, stock: Tensor, exact: Tensor) -> float:
    """Distance to the exact result, relative to that of the stock one."""
    ours, theirs = ((latent - exact).square().mean().sqrt().item() for latent in (out, stock))
    return ours / theirs


def used_device_memory() -> float:
    """GB of the device that are taken, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9
