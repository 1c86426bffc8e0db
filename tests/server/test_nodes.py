"""ComfyUI's own nodes between loader and sampler that act above the denoise call: each before or after Apply Context Parallel, in
`make soak` both.

They stay in ComfyUI's process, so nothing of them is known here but their names; the latent must be the stock graph's.
"""

import re
from functools import partial
from typing import Any

import pytest
from support.graphs import GUIDED_FLUX, MODEL, NodeSpec, Prompt, flux_prompt, wan_prompt
from support.latents import assert_close
from support.node_graphs import LATENT, NEGATIVE, POSITIVE, GraphCase, NodeCase, assert_stock, node

CP = {"world_size": 2}

WAN = partial(wan_prompt, steps=3, cfg=4.0)
GRADUAL = {"noise": 1.0, "noise_mask": "gradient"}


TONEMAP = {"operation": ("LatentOperationTonemapReinhard", {"multiplier": 0.5})}
FLUX_SHIFT = {"max_shift": 1.5, "base_shift": 0.7, "width": 512, "height": 512}
LONG = partial(GUIDED_FLUX, steps=12, cfg=2.0)
CACHE = {"reuse_threshold": 2.0, "start_percent": 0.1, "end_percent": 0.9, "verbose": True}
ROPE = {"scale_x": 1.5, "shift_x": 1.0, "scale_y": 0.7, "shift_y": 2.0, "scale_t": 1.5, "shift_t": 1.0}

# Windows of three latent frames, two of them shared.
WINDOWS = {"context_length": 9, "context_overlap": 5, "context_schedule": "standard_static", "freenoise": False}
CASES = {
    # model sampling
    "ModelSamplingAuraFlow": NodeCase("ModelSamplingAuraFlow", {"shift": 1.73}, WAN),
    "ModelSamplingSD3": NodeCase("ModelSamplingSD3", {"shift": 5.0}, WAN),
    "ModelSamplingSD3 on Flux": NodeCase("ModelSamplingSD3", {"shift": 5.0}),
    "ModelSamplingFlux": NodeCase("ModelSamplingFlux", FLUX_SHIFT),
    "ModelNoiseScale": NodeCase("ModelNoiseScale", {"noise_scale": 2.0}, WAN),
    # guidance
    "CFGNorm": NodeCase("CFGNorm", {"strength": 0.7}),
    "CFGNorm before": NodeCase("CFGNorm", {"strength": 1.0, "pre_cfg": True}),
    "CFGOverride": NodeCase("CFGOverride", {"cfg": 1.0, "start_percent": 0.0, "end_percent": 0.7}),
    "CFGZeroStar": NodeCase("CFGZeroStar", graph=WAN),
    "RescaleCFG": NodeCase("RescaleCFG", {"multiplier": 0.7}),
    "RenormCFG": NodeCase("RenormCFG", {"cfg_trunc": 0.8, "renorm_cfg": 1.0}),
    "Mahiro": NodeCase("Mahiro"),
    "APG": NodeCase("APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": -0.5}),
    "TCFG": NodeCase("TCFG"),
    "FreSca": NodeCase("FreSca", {"scale_low": 0.8, "scale_high": 1.5, "freq_cutoff": 2}),
    "VideoLinearCFGGuidance": NodeCase("VideoLinearCFGGuidance", {"min_cfg": 1.0}, partial(GUIDED_FLUX, batch=3)),
    "LatentApplyOperationCFG": NodeCase("LatentApplyOperationCFG", {"operation": ["operation", 0]}, others=TONEMAP),
    # the denoise mask, skipped steps, positions
    "DifferentialDiffusion": NodeCase("DifferentialDiffusion", {"strength": 1.0}, partial(GUIDED_FLUX, steps=6, latent=GRADUAL)),
    "EasyCache": NodeCase("EasyCache", CACHE, LONG),
    "EasyCache on Wan": NodeCase("EasyCache", CACHE, partial(WAN, steps=12)),
    "LazyCache": NodeCase("LazyCache", CACHE, LONG),
    "ScaleROPE": NodeCase("ScaleROPE", ROPE, WAN),
    "ScaleROPE on Flux": NodeCase("ScaleROPE", ROPE, GUIDED_FLUX),
    "WanContextWindowsManual": NodeCase("WanContextWindowsManual", WINDOWS, partial(WAN, frames=5)),
    # weights, by a name that no transformer has: two templates put it in front of Wan
    "UNetTemporalAttentionMultiply": NodeCase(
        "UNetTemporalAttentionMultiply",
        dict.fromkeys(("self_structural", "self_temporal", "cross_structural", "cross_temporal"), 1.2),
        WAN,
        matters=False,
    ),
    # wiring
    "ComfySwitchNode": NodeCase("ComfySwitchNode", {"switch": True, "on_true": MODEL, "on_false": ["loader", 0]}, matters=False),
    # a LoRA for model and text encoder
    "LoraLoader": NodeCase(
        "LoraLoader",
        {"clip": ["clip", 0], "lora_name": "flux_lora.safetensors", "strength_model": 0.7, "strength_clip": 1.0},
        others={"clip": ("TestClip", {"seed": 1})},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if turn == number % 2 else pytest.mark.soak)
        for number, name in enumerate(CASES)
        for turn, place in enumerate(("model_nodes", "after_apply"))
    ],
)
def test_node_between_loader_and_sampler(name, place, server):
    assert_stock(server, CASES[name].at(place), CP)


def test_apply_alone_takes_every_device(server):
    """Without a CP Config."""
    prompt = flux_prompt(cp={})
    del prompt["cp_config"], prompt["cp_apply"]["inputs"]["cp_config"]
    assert_close(server.sample(prompt), server.sample_once(flux_prompt()))
    assert len(server.worker_pids()) == 2


def test_several_nodes_in_a_row(server):
    """As templates have them: a shift, a LoRA and two ways of guidance, around Apply."""
    build = partial(
        WAN,
        loras=["wan_t2v_lora"],
        model_nodes=[("ModelSamplingSD3", {"shift": 8.0}), ("CFGZeroStar", {})],
        after_apply=[("CFGNorm", {"strength": 0.9}), ("ScaleROPE", ROPE)],
    )
    assert_close(server.sample(build(cp=CP)), server.sample_once(build()))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("cache", ["EasyCache", "LazyCache"])
def test_steps_that_a_cache_skips_make_no_call(cache, place, server):
    """ComfyUI decides once for all ranks; a cache in every rank may skip where another one waits for it. One that skips nothing
    would equal the stock graph too."""
    before, prompt = len(server.log_text()), LONG(**{place: [(cache, CACHE)]}, cp=CP)
    prompt["calls"] = {"class_type": "TestWorkerCalls", "inputs": {"latent": ["sampler", 0]}}
    result = server.run(prompt, timeout=120).check()
    skipped = int(re.search(rf"{cache} - skipped (\d+)/12 steps", server.log_text()[before:]).group(1))
    assert 0 < skipped < 12
    assert result.outputs["calls"]["text"] == [str(12 - skipped)]


# --- guiders and sampler nodes ---------------------------------------------------------------------------------------

CUSTOM = partial(GUIDED_FLUX, node="SamplerCustomAdvanced")
SECOND = {"second": node("TestConditioning", seed=7, tokens=9, width=64, pooled_width=64)}
OTHER = {"other": node("UNETLoader", unet_name="flux_h3.safetensors")}


def guided(class_type: str, nodes: dict[str, NodeSpec], **inputs: Any) -> GraphCase:
    """Another guider of the same model."""

    def change(prompt: Prompt) -> None:
        model = prompt["guider"]["inputs"]["model"]
        prompt["guider"] = {"class_type": class_type, "inputs": {"model": model, **inputs}}

    return GraphCase(CUSTOM, nodes, change=change)


def sampled(class_type: str, **inputs: Any) -> GraphCase:
    """Another sampler."""
    return GraphCase(CUSTOM, change=lambda prompt: prompt.update(sampler_select={"class_type": class_type, "inputs": inputs}))


def dual_cfg(style: str) -> GraphCase:
    conds = {"cond1": POSITIVE, "cond2": ["second", 0], "cfg_conds": 3.0, "cfg_cond2_negative": 2.0}
    return guided("DualCFGGuider", SECOND, style=style, **conds)


def with_apply(prompt: Prompt) -> None:
    """Both models of the guider are on the same ranks."""
    inputs = prompt["guider"]["inputs"]
    prompt["guider"] = {"class_type": "DualModelGuider", "inputs": {**inputs, "model_negative": ["other", 0]}}
    if "cp_config" in prompt:
        apply = {"model": ["other", 0], "cp_config": ["cp_config", 0]}
        prompt["other_apply"] = {"class_type": "ApplyContextParallel", "inputs": apply}
        prompt["guider"]["inputs"]["model_negative"] = ["other_apply", 0]


def sampler_custom(prompt: Prompt) -> None:
    inputs = {"model": prompt.pop("guider")["inputs"]["model"], "latent_image": LATENT, "cfg": 4.0, "noise_seed": 1}
    prompt["sampler"] = {"class_type": "SamplerCustom", "inputs": {**inputs, "sampler": ["sampler_select", 0]}}
    del prompt["noise"]


SWITCH = {"switch": node("ComfySwitchNode", switch=False, on_true=NEGATIVE, on_false=POSITIVE)}
GUIDED = {
    "BasicGuider": GraphCase(partial(CUSTOM, cfg=1.0), matters=False),
    "CFGGuider": GraphCase(CUSTOM, matters=False),
    "DualCFGGuider": dual_cfg("regular"),
    "DualCFGGuider nested": dual_cfg("nested"),
    "DualModelGuider": GraphCase(CUSTOM, OTHER, change=with_apply),
    "SamplerCustom": GraphCase(CUSTOM, change=sampler_custom, matters=False),
    "SamplerEulerAncestral": sampled("SamplerEulerAncestral", eta=0.8),
    "SamplerLCM": sampled("SamplerLCM", s_noise=0.9, s_noise_end=0.7, noise_clip_std=2.0),
    "ComfySwitchNode": GraphCase(GUIDED_FLUX, SWITCH, {"positive": ["switch", 0]}, matters=False),
}


@pytest.mark.parametrize("name", GUIDED)
def test_guider_or_sampler(name, server):
    assert_stock(server, GUIDED[name], cp=CP)
