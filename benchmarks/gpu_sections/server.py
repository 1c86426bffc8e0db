"""A real ComfyUI server for the sections, on machines that lack its front end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import stand_in
from support.graphs import Prompt
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

Cases = Mapping[str, tuple[partial[Prompt], Mapping[str, Any]]]
"""Graphs, and inputs of CP Config with them, as in `support.card_cases`."""


class Server(ComfyServer):
    """A server whose results a section compares. On a GPU float32 is float32: without TF32, as on the CPU.

    Args:
        models: folder of the models.
        arguments: of ComfyUI's command line.
        cp: inputs of CP Config; by default for two ranks that share the device.
    """

    def __init__(
        self,
        section: Section,
        models: Path,
        *arguments: str,
        cp: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.section, self.cp = section, section.ranks(2) if cp is None else dict(cp)
        page = models / "front" / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("<html></html>")
        cpu = section.device == "cpu"
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(DETECTION), os.environ.get("PYTHONPATH", ""))))}
        super().__init__(
            COMFYUI,
            models=models,
            args=["--front-end-root", str(page.parent), "--use-pytorch-cross-attention", *arguments],
            env={**path, "NVIDIA_TF32_OVERRIDE": "0", **({stand_in.VARIABLE: None} if cpu else {}), **(env or {})},
            cpu=cpu,
        )

    def measured(self, prompt: Prompt, timeout: float = TIMEOUT) -> tuple[Tensor, Result]:
        """Run a prompt that must succeed; return its latent, in float32."""
        result = self.run(prompt, timeout=timeout).check()
        return self.latent(result).float(), result

    def compare(self, name: str, stock: Prompt, ours: Prompt) -> Tensor | None:
        """Report on two graphs in float32. Returns the latent of the stock graph, unless it failed."""
        expected = None
        with self.section.part(name):
            (expected, before), (out, after) = self.measured(stock), self.measured(ours)
            difference = largest(out, expected)
            good = out.shape == expected.shape and difference <= LARGEST
            self.section.check(name, good, largest=difference, stock_seconds=before.seconds, seconds=after.seconds)
        return expected

    def compare_cases(self, cases: Cases, kind: str = "") -> dict[str, Tensor]:
        """Report on cases in float32; return the latents of the stock graphs that ran."""
        found = {name: self.compare(name + kind, graph(), graph(cp={**self.cp, **own})) for name, (graph, own) in cases.items()}
        return {name: stock for name, stock in found.items() if stock is not None}

    def compare_rounding(self, name: str, stock: Prompt, ours: Prompt, exact: Tensor) -> None:
        """Report on two graphs in another precision: the distance to the exact latent, relative to that of the stock one."""
        with self.section.part(name):
            ratio = over_stock(self.measured(ours)[0], self.measured(stock)[0], exact)
            self.section.check(name, ratio <= ROUNDING, rms_over_stock=ratio)


def new_models() -> Path:
    """Make a folder for models. The runner removes it with everything else that a section leaves."""
    return Path(tempfile.mkdtemp())


def largest(out: Tensor, expected: Tensor) -> float:
    """Difference, relative to the standard deviation of what was expected."""
    return ((out - expected).abs().max() / expected.std()).item()


def over_stock(out: Tensor, stock: Tensor, exact: Tensor) -> float:
    """Distance to the exact result, relative to that of the stock one."""
    ours, theirs = ((latent - exact).square().mean().sqrt().item() for latent in (out, stock))
    return ours / theirs


def used_device_memory() -> float:
    """GB of the device that are taken, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9
