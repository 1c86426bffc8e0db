"""A node pack whose loader leaves a recipe of its own, and which needs ComfyUI's server, as many packs do.

Its files are copied for a test that changes them.
"""

from typing import Any

import folder_paths
import torch
from server import PromptServer

from . import loaders

ROUTES = PromptServer.instance.routes
DTYPES = {"default": None, "fp8_e4m3fn": torch.float8_e4m3fn}


def load_in_init(path: str) -> Any:
    return loaders.load_scaled(path)


class TestFactoryLoader:
    """Load a model by a function of this pack. `kind`: how it is noted in the model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "unet_name": ("STRING", {"default": "flux.safetensors"}),
                "kind": (["plain", "in a list", "by name", "of an object", "in init", "a method"],),
                "weight_dtype": (list(DTYPES),),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, unet_name: str, kind: str, weight_dtype: str) -> tuple[Any, ...]:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        options = {"dtype": DTYPES[weight_dtype]} if DTYPES[weight_dtype] else {}
        model = loaders.load_scaled(path, options)
        others = {
            "in a list": (loaders.load_several, (path, {**options, "load_device": torch.device("cpu")}), 1),
            "by name": (loaders.load_scaled, (unet_name,)),
            "of an object": (loaders.load_scaled, (path, {"custom_operations": object()})),
            "in init": (load_in_init, (path,)),
            "a method": (self.load, (unet_name, kind, weight_dtype)),
        }
        model.cached_patcher_init = others.get(kind, model.cached_patcher_init)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestFactoryLoader": TestFactoryLoader}
