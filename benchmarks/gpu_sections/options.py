"""What every section is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run.

    Args:
        rehearse: with small sizes, on fake CUDA devices (`support.stand_in`).
        few: few cases of each section.
        device: where tensors lie.
        limits: times as long as usual that something may take.
    """

    rehearse: bool = False
    few: bool = False
    device: str = "cuda:0"
    limits: float = 1.0

    def devices(self, ranks: int) -> str:
        """The input `devices` of CP Config for ranks that share this machine's one device."""
        return ",".join([self.device] * ranks)

    @property
    def comfyui(self) -> Path:
        """ComfyUI's folder."""
        return Path(os.environ["COMFYUI_PATH"])

    @staticmethod
    def has_cuda() -> bool:
        """Whether torch sees a GPU."""
        import torch

        return torch.cuda.is_available()
