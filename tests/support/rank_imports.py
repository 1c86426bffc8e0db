"""The first import of a process that ranks are forked from: torch on one thread, this package, and ComfyUI if some of it follows.

torch's own threads do not survive a fork. The ranks share the seed of Python's hashes; those of a pool do not.
"""

import sys
from pathlib import Path

import torch

from .package import load_package
from .ranks import use_comfyui

load_package()
torch.set_num_threads(1)
sys.path += map(str, (Path(__file__).parents[1] / "ranks").iterdir())  # what scripts have in common
if any(name.startswith("comfy") for name in sys.argv[1:]):
    use_comfyui()
