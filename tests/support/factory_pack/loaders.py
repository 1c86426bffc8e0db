"""Functions that load a model, and change it on the way, so that a file that is loaded without them gives another picture."""

from typing import Any

import comfy.sd
import comfy.utils
import torch

from .scale import scaled


def load_scaled(path: str, model_options: dict[str, Any] | None = None, disable_dynamic: bool = False) -> Any:
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    name = "final_layer.linear.weight"
    weights[name] = scaled(weights[name])
    model = comfy.sd.load_diffusion_model_state_dict(
        weights, model_options=dict(model_options or {}), metadata=metadata, disable_dynamic=disable_dynamic
    )
    model.cached_patcher_init = (load_scaled, (path, model_options))
    return model


def load_several(path: str, model_options: dict[str, Any] | None = None) -> list[Any]:
    return [torch.nn.Identity(), load_scaled(path, model_options)]
