"""Patches that other nodes put into the transformer, on a rank."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from ...engine.call import RunningCall
from ..shared.patches import MIRRORED, map_patches, name_of
from .objects import read

ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""Networks of patches, by key."""


def attach_network(key: str, module: nn.Module, device: torch.device) -> None:
    ATTACHED[key] = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))


def read_patches(encoded: Mapping[str, Any], model: nn.Module, call: RunningCall, device: torch.device) -> dict[str, Any]:
    """Read the patches of a call: `patches` and `patches_replace` of transformer_options, which expect this rank's tokens, and
    object patches by their path in the model, as `objects`."""
    have: dict[str, Callable[[Any], Any]] = {
        "module": model.get_submodule,
        "network": ATTACHED.__getitem__,
        "compression": lambda factor: SimpleNamespace(spacial_compression_encode=lambda: factor),
    }
    data = base64.b64decode(encoded["data"])
    things = read(data, encoded["tensors"], device, lambda reference: have[reference[0]](reference[1])).thing

    def adapted(_: str, patch: Any) -> Any:
        adapt = MIRRORED[name_of(patch)].adapt
        return adapt(patch, call) if adapt and call.mesh.size > 1 else patch

    return {**map_patches(things, adapted), "objects": things["objects"]}
