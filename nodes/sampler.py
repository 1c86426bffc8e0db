"""CP Sampler: KSampler on the ranks, with a report."""

from __future__ import annotations

import json
from typing import Any

import comfy.samplers
from comfy_api.latest import io

from ..cp_runtime.comfy.ui.report import run_with_report
from ..cp_runtime.pool.config import RuntimeConfig
from .config import ALIASES, CATEGORY, CPConfigType


class CPSampler(io.ComfyNode):
    """A node that samples like KSampler and reports on the ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPSampler",
            display_name="CP Sampler",
            category=CATEGORY,
            search_aliases=[*ALIASES, "ksampler"],
            description="KSampler on several devices, with a report of time, communication and memory. Any other sampler works as "
            "well and as fast after Apply Context Parallel; this one is for measuring.",
            inputs=[
                io.Model.Input("model", tooltip="The model to denoise with, with or without Apply Context Parallel before it."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Seed of the noise. The same seed gives the same picture, up to rounding, on any number of devices.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Denoising steps. More steps take more time."),
                io.Float.Input(
                    "cfg",
                    default=8.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance: how closely the picture follows the prompt. Above 1 every step computes "
                    "positive and negative, on different devices if possible. At 1 it computes only the positive: half the work.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=comfy.samplers.KSampler.SAMPLERS,
                    tooltip="Sampling algorithm. All work with several devices; some call the model twice or more per step.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    tooltip="How noise is removed over the steps. Costs no time.",
                ),
                io.Conditioning.Input("positive", tooltip="What the picture should contain."),
                io.Conditioning.Input("negative", tooltip="What it should not contain."),
                io.Latent.Input(
                    "latent_image",
                    tooltip="The latent to denoise. Its size determines the number of tokens to split: small latents gain little.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Amount of denoising. 1 = full; lower values keep more of the latent.",
                ),
                CPConfigType.Input(
                    "cp_config",
                    optional=True,
                    tooltip="From CP Config. Not needed if the model went through Apply Context Parallel; if given, it replaces "
                    "that one.",
                ),
            ],
            outputs=[
                io.Latent.Output(tooltip="The denoised latent."),
                io.String.Output(
                    display_name="report",
                    tooltip="JSON: ranks, degrees, seconds per step, communication, tokens and memory per rank. Connect it to CP "
                    "Report, or to Preview as Text.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls, model: Any, steps: int, latent_image: Any, cp_config: RuntimeConfig | None = None, **sampling: Any
    ) -> io.NodeOutput:
        from nodes import common_ksampler  # ComfyUI's module of that name

        def sample(prepared: Any) -> Any:
            return common_ksampler(prepared, steps=steps, latent=latent_image, **sampling)[0]

        latent, report = run_with_report(model, cp_config, steps, sample)
        return io.NodeOutput(latent, json.dumps(report, indent=2))
