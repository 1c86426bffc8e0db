"""Nodes whose models come from no function of ComfyUI's loaders that anybody could repeat."""

from collections.abc import Callable
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from server import PromptServer  # as many packs do: no worker has one

from .encoders import randomised
from .node import node

ROUTES = PromptServer.instance.routes
DTYPES = {"default": None, "fp8_e4m3fn": torch.float8_e4m3fn}


def _path(unet_name: str) -> str:
    return folder_paths.get_full_path_or_raise("diffusion_models", unet_name)


def _load(path: str, change: Callable[[dict[str, Any]], Any], dtype: torch.dtype | None) -> Any:
    """Load a model, whose weights another function changes on the way."""
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    change(weights)
    options = {} if dtype is None else {"dtype": dtype}
    model = comfy.sd.load_diffusion_model_state_dict(weights, model_options=options, metadata=metadata)
    model.cached_patcher_init = (_load, (path, change, dtype))
    return model


@node("MODEL", kind=["callback", "without a recipe"], weight_dtype=list(DTYPES))
def TestLoader(unet_name: str = "flux.safetensors", kind: str = "callback", weight_dtype: str = "default") -> Any:
    """Load a model with a function that changes a weight; note how it was loaded, or nothing."""
    factor = 0.5

    def change(weights: dict[str, Any]) -> None:
        name = "final_layer.linear.weight"
        weights[name] = (weights[name].float() * factor).to(weights[name].dtype)

    model = _load(_path(unet_name), change, DTYPES[weight_dtype])
    if kind == "without a recipe":
        model.cached_patcher_init = None
    return model


@node("MODEL")
def TestModel(unet_name: str = "flux.safetensors", seed: int = 0) -> Any:
    """Make a model of random weights, with the settings of the one in a file."""
    weights, metadata = comfy.utils.load_torch_file(_path(unet_name), return_metadata=True)
    config = comfy.model_detection.model_config_from_unet(weights, "", metadata=metadata)
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(weights, "")
    patcher = ModelPatcher(model, comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device())
    return randomised(patcher, model.diffusion_model, seed)
