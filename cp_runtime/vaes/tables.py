"""The plans of ComfyUI 0.30.0's VAEs."""

from __future__ import annotations

from torch import nn

from ..engine.rows.plan import RowPlan

ATTENTION = "optimized_attention"


def draws_noise(model: nn.Module) -> str | None:
    """Return why an LTXV VAE conditioned on a timestep cannot be split: every rank would draw its own noise."""
    if getattr(model, "timestep_conditioning", False) or any(getattr(m, "inject_noise", False) for m in model.modules()):
        return "this LTXV VAE adds noise while it decodes, which would differ from rank to rank. Set mode to tiles."
    return None


TABLES = (
    # SD 1.5, SDXL, Flux 2, HunyuanVideo
    RowPlan(
        family="AutoencoderKL (SD 1.5, SDXL, Flux 2, HunyuanVideo)",
        model_class="comfy.ldm.models.autoencoder.AutoencoderKL",
        attention=ATTENTION,
    ),
    RowPlan(
        family="AutoencoderKL without quantisation convolutions (SD3, Flux, HunyuanImage 2.1, HunyuanVideo 1.5)",
        model_class="comfy.ldm.models.autoencoder.AutoencodingEngine",
        attention=ATTENTION,
    ),
    RowPlan(family="Wan 2.1, Qwen-Image", model_class="comfy.ldm.wan.vae.WanVAE", attention=ATTENTION),
    RowPlan(family="Wan 2.2", model_class="comfy.ldm.wan.vae2_2.WanVAE", attention=ATTENTION),
    RowPlan(
        family="LTXV",
        model_class="comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE",
        least=2,
        budget="get_max_chunk_size",
        refuses=draws_noise,
    ),
)
