"""The nodes: they translate inputs and call `cp_runtime`."""

from typing import Any

from ..cp_runtime.comfy.ui.server import in_own_language
from .apply import ApplyContextParallel
from .config import CPConfig
from .pipefusion import CPPipeFusion
from .report import CPReport
from .sampler import CPSampler
from .upscale import CPUpscaleImage
from .vae import CPVAEDecode, CPVAEEncode

SHARING = [ApplyContextParallel, CPSampler, CPVAEDecode, CPVAEEncode, CPUpscaleImage]
"""Those that need ranks."""
NODES: list[Any] = [CPConfig, ApplyContextParallel, CPSampler, CPReport, CPPipeFusion, CPVAEDecode, CPVAEEncode, CPUpscaleImage]
for node in NODES:
    node.execute = classmethod(in_own_language(vars(node)["execute"].__func__))
