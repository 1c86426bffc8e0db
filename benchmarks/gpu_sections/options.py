"""What every section is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run.

    Args:
        rehearse: on CPU ranks, with small sizes.
        few: few cases of each section.
    """

    rehearse: bool = False
    few: bool = False

    @property
    def device(self) -> str:
        """Where tensors lie."""
        return "cpu" if self.rehearse else "cuda:0"

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
