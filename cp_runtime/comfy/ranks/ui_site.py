"""The place where the workers find this process's ComfyUI and its models."""

from __future__ import annotations

import os
import sys

import comfy.model_management
import comfy.options
import folder_paths
from comfy.cli_args import args

from ...pool.config import WorkerSite

PRELOAD = (
    "torch",
    "torchvision",
    "torchaudio",
    "scipy.integrate",
    "scipy.ndimage",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.tokenization_t5",
    "transformers.models.qwen2.tokenization_qwen2",
    "einops",
    "psutil",
    "safetensors.torch",
    "yaml",
)
"""What ComfyUI's code in a rank imports of other packages: nine tenths of its time. ComfyUI itself looks at its device when it is
imported, so every rank does that on its own, unless the device is the CPU."""
PRELOAD_CPU = (*PRELOAD, "cp_runtime.comfy.ranks.rank_preload")
NO_MODELS = ("custom_nodes", "datasets", "configs")  # folders that ComfyUI knows and keeps no weights in


def node_folders() -> list[str]:
    """Return the folders of ComfyUI's node packs."""
    return sorted(map(os.path.abspath, folder_paths.get_folder_paths("custom_nodes")))


def worker_site() -> WorkerSite:
    """Return the site of the ranks: their code, their ComfyUI, and the folders that they may load models from."""
    registered = {name: folders for name, (folders, _) in folder_paths.folder_names_and_paths.items() if name not in NO_MODELS}
    folders = {os.path.abspath(folder) for folders in registered.values() for folder in folders}
    return WorkerSite(
        service="comfy.ranks.rank_service",
        arguments={"model_folders": sorted(folders), "node_folders": node_folders()},
        path=(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_management.__file__))),),
        preload=PRELOAD_CPU if args.cpu else PRELOAD,
        # Where another program embeds ComfyUI, the command line is not ComfyUI's.
        argv=("main.py", *(sys.argv[1:] if comfy.options.args_parsing else ())),
    )
