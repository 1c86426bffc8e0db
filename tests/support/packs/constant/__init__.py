"""Sets a constant of ComfyUI's, by which the sines of timesteps have other lengths."""

import comfy.ldm.modules.diffusionmodules.openaimodel as unet
from comfy.ldm.modules.diffusionmodules import util

NODE_CLASS_MAPPINGS = {}
util.timestep_embedding.__defaults__ = (1000, False)
unet.timestep_embedding = util.timestep_embedding
