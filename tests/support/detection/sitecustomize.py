"""Lets a tiny checkpoint say what it is, since ComfyUI's detection knows the published sizes of most families only.

Python imports this module in every process that has its folder on PYTHONPATH: the server under test and, because they inherit the
environment, its worker ranks. A file with the metadata entry `test_model`, written by `support.models`, is taken at its word; any
other goes through ComfyUI's own detection. Nothing is imported before ComfyUI does.
"""

import ast
import importlib.abc
import importlib.util
import sys
from typing import Any

MODULE = "comfy.model_detection"


class PatchOnImport(importlib.abc.MetaPathFinder):
    """Finds the module as everybody else would, and patches it once it has been executed."""

    def find_spec(self, name: Any, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def patch(detection: Any) -> None:
    """Make `model_config_from_unet` read the metadata entry."""
    detect = detection.model_config_from_unet

    def model_config_from_unet(
        state_dict: Any, unet_key_prefix: Any, use_base_if_no_match: Any = False, metadata: Any = None
    ) -> Any:
        entry = (metadata or {}).get("test_model")
        if entry is None:
            return detect(state_dict, unet_key_prefix, use_base_if_no_match, metadata)
        entry = ast.literal_eval(entry)
        config = getattr(detection.comfy.supported_models, entry["config"])(entry["unet_config"])
        config.unet_config.update(entry["unet_config"])  # over sizes that the class has for good
        # The file has the names of the module itself, not of a published checkpoint, and what stands around it.
        config.process_unet_state_dict = lambda sd: {name: t for name, t in sd.items() if not name.startswith("conditioner.")}
        return config

    detection.model_config_from_unet = model_config_from_unet


sys.meta_path.insert(0, PatchOnImport())
