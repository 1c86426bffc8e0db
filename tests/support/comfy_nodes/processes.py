"""Nodes that show what a server and its workers did, and take their memory."""

import sys
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import torch

from .node import node

IDLE: list[Any] = []
"""Models of `TestIdleModel`: ComfyUI refers to them weakly."""
CONTROLLER = "cp_runtime.comfy.ui.runtime"


@node(latent="LATENT")
def TestWorkerCalls(latent: Any) -> dict[str, Any]:
    """Show how many denoise calls the workers had in the sampling run of `latent`."""
    (module,) = (module for name, module in sys.modules.items() if name.endswith(CONTROLLER))
    sums = module.CONTROLLER.journal.run  # which leaves the first call out, if there were more
    return {"ui": {"text": [str(sums.count + 1)]}}


@node(again=True)
def TestRoom(more: float = 0.0) -> dict[str, Any]:
    """Have ComfyUI free its device, as it does before it loads something: `more` megabytes beside those that are free now.

    Shows, in megabytes, what is free then.
    """
    device = mm.get_torch_device()
    mm.free_memory(mm.get_free_memory(device) + more * 1e6, device)
    return {"ui": {"text": [str(mm.get_free_memory(device) / 1e6)]}}


@node(again=True)
def TestIdleModel(gigabytes: float = 1.0, device: str = "cuda:1") -> dict[str, Any]:
    """Have ComfyUI load a model of this size onto a device, as a text encoder that a loader puts there, in the place of the last.

    Its weights are no numbers.
    """
    IDLE.clear()
    network = torch.nn.Module()
    network.weight = torch.nn.Parameter(torch.empty(int(gigabytes * 1e9), dtype=torch.int8, device=device), requires_grad=False)
    IDLE.append(comfy.model_patcher.ModelPatcher(network, torch.device(device), torch.device("meta")))
    mm.load_models_gpu(IDLE[-1:])
    return {"ui": {"text": [str(mm.get_free_memory(torch.device(device)) / 1e9)]}}
