"""The nodes: they translate inputs and call `cp_runtime`."""

from .apply import ApplyContextParallel
from .config import CPConfig
from .pipefusion import CPPipeFusion
from .report import CPReport
from .sampler import CPSampler
from .upscale import CPUpscaleImage
from .vae import CPVAEDecode, CPVAEEncode

SHARING = [ApplyContextParallel, CPSampler, CPVAEDecode, CPVAEEncode, CPUpscaleImage]
"""Those that need ranks."""
NODES = [CPConfig, ApplyContextParallel, CPSampler, CPReport, CPPipeFusion, CPVAEDecode, CPVAEEncode, CPUpscaleImage]
