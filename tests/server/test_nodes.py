"""ComfyUI's own nodes between loader and sampler that act above the denoise call: each before and after Apply Context Parallel.

They stay in ComfyUI's process, so nothing of them is known here but their names; the latent must be the stock graph's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from support.graphs import MODEL, Link, NodeSpec, Prompt, flux_prompt, wan_prompt

TOLERANCE = 2e-4
CP = {"world_size": 2}

FLUX = partial(flux_prompt, steps=3, cfg=4.0)
WAN = partial(wan_prompt, steps=3, cfg=4.0)
GRADUAL = {"noise": 1.0, "noise_mask": "gradient"}


@dataclass(frozen=True)
class Case:
    """A node between loader and sampler.

    Args:
        inputs: of the node, besides its model.
        graph: builder of the graph around it.
        others: nodes that it takes something from.
        matters: whether the latent must be another one without the node.
    """

    node: str
    inputs: dict[str, Any] = field(default_factory=dict)
    graph: partial[Prompt] = FLUX
    others: dict[str, NodeSpec] = field(default_factory=dict)
    matters: bool = True


TONEMAP = {"operation": ("LatentOperationTonemapReinhard", {"multiplier": 0.5})}
FLUX_SHIFT = {"max_shift": 1.5, "base_shift": 0.7, "width": 512, "height": 512}
LONG = partial(FLUX, steps=12, cfg=2.0)
CACHE = {"reuse_threshold": 2.0, "start_percent": 0.1, "end_percent": 0.9, "verbose": True}
ROPE = {"scale_x": 1.5, "shift_x": 1.0, "scale_y": 0.7, "shift_y": 2.0, "scale_t": 1.5, "shift_t": 1.0}

# Windows of three latent frames, two of them shared.
WINDOWS = {
    "context_length": 9, "context_overlap": 5, "context_schedule": "standard_static", "context_stride": 1, "closed_loop": False,
    "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False, "split_conds_to_windows": False,
}  # fmt: skip
CASES = {
    # model sampling
    "ModelSamplingAuraFlow": Case("ModelSamplingAuraFlow", {"shift": 1.73}, WAN),
    "ModelSamplingSD3": Case("ModelSamplingSD3", {"shift": 5.0}, WAN),
    "ModelSamplingSD3 on Flux": Case("ModelSamplingSD3", {"shift": 5.0}),
    "ModelSamplingFlux": Case("ModelSamplingFlux", FLUX_SHIFT),
    "ModelNoiseScale": Case("ModelNoiseScale", {"noise_scale": 2.0}, WAN),
    # guidance
    "CFGNorm": Case("CFGNorm", {"strength": 0.7}),
    "CFGNorm before": Case("CFGNorm", {"strength": 1.0, "pre_cfg": True}),
    "CFGOverride": Case("CFGOverride", {"cfg": 1.0, "start_percent": 0.0, "end_percent": 0.7}),
    "CFGZeroStar": Case("CFGZeroStar", graph=WAN),
    "RescaleCFG": Case("RescaleCFG", {"multiplier": 0.7}),
    "RenormCFG": Case("RenormCFG", {"cfg_trunc": 0.8, "renorm_cfg": 1.0}),
    "Mahiro": Case("Mahiro"),
    "APG": Case("APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": -0.5}),
    "TCFG": Case("TCFG"),
    "FreSca": Case("FreSca", {"scale_low": 0.8, "scale_high": 1.5, "freq_cutoff": 2}),
    "VideoLinearCFGGuidance": Case("VideoLinearCFGGuidance", {"min_cfg": 1.0}, partial(FLUX, batch=3)),
    "LatentApplyOperationCFG": Case("LatentApplyOperationCFG", {"operation": ["operation", 0]}, others=TONEMAP),
    # the denoise mask, skipped steps, positions
    "DifferentialDiffusion": Case("DifferentialDiffusion", {"strength": 1.0}, partial(FLUX, steps=6, latent=GRADUAL)),
    "EasyCache": Case("EasyCache", CACHE, LONG),
    "EasyCache on Wan": Case("EasyCache", CACHE, partial(WAN, steps=12)),
    "LazyCache": Case("LazyCache", CACHE, LONG),
    "ScaleROPE": Case("ScaleROPE", ROPE, WAN),
    "ScaleROPE on Flux": Case("ScaleROPE", ROPE, FLUX),
    "WanContextWindowsManual": Case("WanContextWindowsManual", WINDOWS, partial(WAN, frames=5)),
    # weights, by a name that no transformer has: two templates put it in front of Wan
    "UNetTemporalAttentionMultiply": Case(
        "UNetTemporalAttentionMultiply",
        dict.fromkeys(("self_structural", "self_temporal", "cross_structural", "cross_temporal"), 1.2),
        WAN,
        matters=False,
    ),
    # wiring
    "ComfySwitchNode": Case("ComfySwitchNode", {"switch": True, "on_true": MODEL, "on_false": ["loader", 0]}, matters=False),
    # a LoRA for model and text encoder
    "LoraLoader": Case(
        "LoraLoader",
        {"clip": ["clip", 0], "lora_name": "flux_lora.safetensors", "strength_model": 0.7, "strength_clip": 1.0},
        others={"clip": ("TestClip", {"seed": 1})},
    ),
}  # fmt: skip

_latents: dict[str, Any] = {}


def stock(server, key: str, prompt: Prompt) -> Any:
    """The latent of a graph without context parallelism, computed once per `key`."""
    if key not in _latents:
        _latents[key] = server.latent(server.run(prompt, timeout=120).check())
    return _latents[key]


def assert_same(out, expected) -> None:
    assert expected.std() > 1e-2
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("name", CASES)
def test_node_between_loader_and_sampler(name, place, server):
    case = CASES[name]
    build = partial(case.graph, **{place: [(case.node, case.inputs)]}, others=case.others)
    expected = stock(server, name, build())
    assert_same(server.latent(server.run(build(cp=CP), timeout=120).check()), expected)
    if case.matters:
        plain = stock(server, str(case.graph), case.graph())
        assert (plain - expected).abs().max() > 1e-2 * plain.std()


def test_several_nodes_in_a_row(server):
    """As templates have them: a shift, a LoRA and two ways of guidance, around Apply."""
    build = partial(
        WAN,
        loras=["wan_t2v_lora"],
        model_nodes=[("ModelSamplingSD3", {"shift": 8.0}), ("CFGZeroStar", {})],
        after_apply=[("CFGNorm", {"strength": 0.9}), ("ScaleROPE", ROPE)],
    )
    assert_same(server.latent(server.run(build(cp=CP)).check()), stock(server, "several", build()))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_easy_cache_skips_calls(place, server):
    """A cache that skips nothing would equal the stock graph too."""
    before = len(server.log_text())
    server.run(LONG(**{place: [("EasyCache", CACHE)]}, cp=CP), timeout=120).check()
    assert "EasyCache [verbose] - skipping step" in server.log_text()[before:]


# --- guiders and sampler nodes ---------------------------------------------------------------------------------------


def custom(cp=None, sampler: NodeSpec | None = None, others: dict[str, NodeSpec] | None = None, **options) -> Prompt:
    """A graph with SamplerCustomAdvanced, and with another SAMPLER node where one is given."""
    prompt = FLUX(node="SamplerCustomAdvanced", cp=cp, others=others, **options)
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
    prompt = FLUX(cp=cp, others={"switch": ("ComfySwitchNode", switch)})
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
    expected = stock(server, f"guided {name}", build())
    assert_same(server.latent(server.run(build(cp=CP), timeout=120).check()), expected)


def test_guiders_differ(server):
    latents = [stock(server, f"guided {name}", GUIDED[name]()) for name in GUIDED if "Switch" not in name and "Custom" not in name]
    for i, one in enumerate(latents):
        assert all((one - other).abs().max() > 1e-2 * one.std() for other in latents[:i])
