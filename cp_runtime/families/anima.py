"""Anima: Cosmos Predict2 with another text encoder, which runs before the sharded forward."""

from dataclasses import replace

from .cosmos_predict2 import COSMOS_PREDICT2

ANIMA = replace(COSMOS_PREDICT2, family="Anima", model_class="comfy.ldm.anima.model.Anima")
