"""ComfyUI's own nodes between loader and sampler that act above the denoise call: each before and after Apply Context Parallel.

They stay in ComfyUI's process, so nothing of them is known here but their names; the latent must be the stock graph's.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from support.graphs import GUIDED_FLUX, MODEL, Link, NodeCase, NodeSpec, Prompt, flux_prompt, wan_prompt

TOLERANCE = 2e-4
CP = {"world_size": 2}

WAN = partial(wan_prompt, steps=3, cfg=4.0)
GRADUAL = {"noise": 1.0, "noise_mask": "gradient"}


TONEMAP = {"operation": ("LatentOperationTonemapReinhard", {"multiplier": 0.5})}
FLUX_SHIFT = {"max_shift": 1.5, "base_shift": 0.7, "width": 512, "height": 512}
LONG = partial(GUIDED_FLUX, steps=12, cfg=2.0)
CACHE = {"reuse_threshold": 2.0, "start_percent": 0.1, "end_percent": 0.9, "verbose": True}
ROPE = {"scale_x": 1.5, "shift_x": 1.0, "scale_y": 0.7, "shift_y": 2.0, "scale_t": 1.5, "shift_t": 1.0}

# Windows of three latent frames, two of them shared.
WINDOWS = {
    "context_length": 9, "context_overlap": 5, "context_schedule": "standard_static", "context_stride": 1, "closed_loop": False,
    "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False, "split_conds_to_windows": False,
}  # fmt: skip
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


def assert_same(out, expected) -> None:
    assert expected.std() > 1e-2
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("name", CASES)
def test_node_between_loader_and_sampler(name, place, server):
    case = CASES[name]
    expected = server.sample_once(case.build())
    assert_same(server.sample(case.build(cp=CP, place=place), timeout=120), expected)
    if case.matters:
        plain = server.sample_once(case.graph())
        assert (plain - expected).abs().max() > 1e-2 * plain.std()


def test_apply_alone_takes_every_device(server):
    """Without a CP Config."""
    prompt = flux_prompt(cp={})
    del prompt["cp_config"], prompt["cp_apply"]["inputs"]["cp_config"]
    assert_same(server.sample(prompt), server.sample_once(flux_prompt()))
    assert len(server.worker_pids()) == 2


def test_several_nodes_in_a_row(server):
    """As templates have them: a shift, a LoRA and two ways of guidance, around Apply."""
    build = partial(
        WAN,
        loras=["wan_t2v_lora"],
        model_nodes=[("ModelSamplingSD3", {"shift": 8.0}), ("CFGZeroStar", {})],
        after_apply=[("CFGNorm", {"strength": 0.9}), ("ScaleROPE", ROPE)],
    )
    assert_same(server.sample(build(cp=CP)), server.sample_once(build()))


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


def custom(cp=None, sampler: NodeSpec | None = None, others: dict[str, NodeSpec] | None = None, **options) -> Prompt:
    """A graph with SamplerCustomAdvanced, and with another SAMPLER node where one is given."""
    prompt = GUIDED_FLUX(node="SamplerCustomAdvanced", cp=cp, others=others, **options)
    if sampler is not None:
        prompt["sampler_select"] = {"class_type": sampler[0], "inputs": sampler[1]}
    return prompt


def with_guider(prompt: Prompt, class_type: str, **inputs: Any) -> Prompt:
    prompt["guider"] = {"class_type": class_type, "inputs": inputs}
    return prompt


def model_of(prompt: Prompt) -> Link:
    return prompt["guider"]["inputs"]["model"]


def basic_guider(cp=None) -> Prompt:
    return custom(cp, cfg=1.0)


def dual_cfg(style: str, cp=None) -> Prompt:
    prompt = custom(cp, others={"second": ("TestConditioning", {"seed": 7, "tokens": 9, "width": 64, "pooled_width": 64})})
    conds = {"cond1": ["positive", 0], "cond2": ["second", 0], "negative": ["negative", 0]}
    scales = {"cfg_conds": 3.0, "cfg_cond2_negative": 2.0, "style": style}
    return with_guider(prompt, "DualCFGGuider", model=model_of(prompt), **conds, **scales)


def dual_model(cp=None, *, negative: bool = True) -> Prompt:
    """Two models in one guider, both on the same ranks."""
    loader = ("UNETLoader", {"unet_name": "flux_h3.safetensors", "weight_dtype": "default"})
    others: dict[str, NodeSpec] = {"other": loader}
    other = ["other", 0]
    if cp is not None:
        others["other_apply"] = ("ApplyContextParallel", {"model": other, "cp_config": ["cp_config", 0]})
        other = ["other_apply", 0]
    prompt = custom(cp, others=others)
    conds: dict[str, Any] = {"positive": ["positive", 0]}
    if negative:
        conds["negative"] = ["negative", 0]
    return with_guider(prompt, "DualModelGuider", model=model_of(prompt), model_negative=other, cfg=4.0, **conds)


def sampler_custom(cp=None) -> Prompt:
    prompt = custom(cp)
    model = model_of(prompt)
    del prompt["guider"], prompt["noise"]
    conds = {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 4.0}
    settings = {"add_noise": True, "noise_seed": 1, "sampler": ["sampler_select", 0], "sigmas": ["sigmas", 0]}
    inputs = {"model": model, "latent_image": ["latent", 0], **conds, **settings}
    prompt["sampler"] = {"class_type": "SamplerCustom", "inputs": inputs}
    return prompt


def switched_conditioning(cp=None) -> Prompt:
    switch = {"switch": False, "on_true": ["negative", 0], "on_false": ["positive", 0]}
    prompt = GUIDED_FLUX(cp=cp, others={"switch": ("ComfySwitchNode", switch)})
    prompt["sampler"]["inputs"]["positive"] = ["switch", 0]
    return prompt


GUIDED = {
    "BasicGuider": basic_guider,
    "CFGGuider": custom,
    "DualCFGGuider": partial(dual_cfg, "regular"),
    "DualCFGGuider nested": partial(dual_cfg, "nested"),
    "DualModelGuider": dual_model,
    "SamplerCustom": sampler_custom,
    "SamplerEulerAncestral": partial(custom, sampler=("SamplerEulerAncestral", {"eta": 0.8, "s_noise": 1.0})),
    "SamplerLCM": partial(custom, sampler=("SamplerLCM", {"s_noise": 0.9, "s_noise_end": 0.7, "noise_clip_std": 2.0})),
    "ComfySwitchNode": switched_conditioning,
}


@pytest.mark.parametrize("name", GUIDED)
def test_guider_or_sampler(name, server):
    build = GUIDED[name]
    expected = server.sample_once(build())
    assert_same(server.sample(build(cp=CP), timeout=120), expected)


def test_guiders_differ(server):
    latents = [server.sample_once(GUIDED[name]()) for name in GUIDED if "Switch" not in name and "Custom" not in name]
    for i, one in enumerate(latents):
        assert all((one - other).abs().max() > 1e-2 * one.std() for other in latents[:i])
