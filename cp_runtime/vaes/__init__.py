"""Plans of the VAEs of ComfyUI, one per class: data, as in `families`. `row_plan_for` finds a VAE's plan."""

from __future__ import annotations

from torch import nn

from ..engine.rows.plan import RowPlan
from ..errors import UnsupportedError

ATTENTION = "optimized_attention"


def draws_noise(model: nn.Module) -> str | None:
    """Return why an LTXV VAE conditioned on a timestep cannot be split: every rank would draw its own noise."""
    if getattr(model, "timestep_conditioning", False) or any(getattr(m, "inject_noise", False) for m in model.modules()):
        return "this LTXV VAE draws noise while it decodes, which would differ from rank to rank."
    return None


TABLES = (
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
        least=2,  # its padding reflects the row behind the first one
        budget="get_max_chunk_size",
        refuses=draws_noise,
    ),
)
ROW_PLANS: dict[str, RowPlan] = {plan.model_class: plan for plan in TABLES}


def row_plan_for(model: nn.Module) -> RowPlan:
    """Return the checked plan of a VAE. Raises UnsupportedError if its class has none, or it cannot run on a part of the rows;
    PlanError if the plan is for another VAE."""
    plan = ROW_PLANS.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if plan is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no plan for mode exact; docs/generated/families.md lists the VAEs that have one. "
            "Set mode to tiles."
        )
    plan.check(model)
    return plan
