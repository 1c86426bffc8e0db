"""Node classes of ComfyUI's templates that load a second file beside the model: style models, model patches, ControlNets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from support import families
from support.graphs import Link, NodeSpec, Prompt, family_prompt, flux_prompt, wan_prompt

TOLERANCE = 2e-4
CP = {"world_size": 2, "batch_degree": 1}
PAIR = {"positive": ["positive", 0], "negative": ["negative", 0]}
REDUX = {"redux_up": (3 * 4096, 1152), "redux_down": (4096, 3 * 4096)}  # the one size there is
LLLITE = "lllite.safetensors"


@pytest.fixture(scope="module")
def style_model(checkpoints_dir) -> str:
    """A Redux at random."""
    draw, tensors = torch.Generator().manual_seed(1), {}
    for name, shape in REDUX.items():
        tensors[f"{name}.weight"] = (torch.randn(shape, generator=draw) / shape[1] ** 0.5).half()
        tensors[f"{name}.bias"] = (0.1 * torch.randn(shape[0], generator=draw)).half()
    file = checkpoints_dir / "style_models" / "redux.safetensors"
    file.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, file)
    return file.name


@dataclass(frozen=True)
class Graph:
    """A graph with a node beside it, and its sampler's inputs from there.

    Args:
        base: builder of the graph around it.
        nodes: by id.
        wiring: inputs of the sampler.
        settings: of the graph.
    """

    base: Any
    nodes: Mapping[str, NodeSpec] = field(default_factory=dict)
    wiring: Mapping[str, Link] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, cp: Mapping[str, Any] | None = None) -> Prompt:
        prompt = self.base(cp=cp, others=self.nodes, **{"cfg": 3.0, "node": "CPSampler", **self.settings})
        prompt["sampler"]["inputs"].update(self.wiring)
        return prompt


def family(name: str):
    entry = families.served()[name][1]
    return lambda **settings: family_prompt(entry, **settings)


def compare(server, graph: Graph) -> None:
    plain = latent(server, replace(graph, nodes={}, wiring={}, settings={}).build())
    stock = latent(server, graph.build())
    result = server.run(graph.build(CP), timeout=300).check()
    out = server.latent(result, "save")
    for rank in json.loads(result.outputs["report"]["text"][0])["ranks"]:
        assert any(rank["tokens"].values())
    assert stock.std() > 1e-2
    assert (out - stock).abs().max() <= TOLERANCE * stock.std()
    assert plain.shape != stock.shape or (plain - stock).abs().max() > 1e-2 * plain.std()


def latent(server, prompt: Prompt) -> torch.Tensor:
    return server.sample(prompt, timeout=300, node_id="save")


@pytest.mark.parametrize("served", ["flux_redux"])
@pytest.mark.parametrize("strength", [("multiply", 0.8), ("attn_bias", 0.5)], ids=["multiply", "attn_bias"])
def test_style_model(strength, served, server, family_checkpoints, style_model):
    assert served not in family_checkpoints, family_checkpoints[served]
    nodes = {
        "seen": ("TestVision", {"seed": 3, "tokens": 9, "width": 1152}),
        "style": ("StyleModelLoader", {"style_model_name": style_model}),
        "node": (
            "StyleModelApply",
            {
                "conditioning": PAIR["positive"],
                "style_model": ["style", 0],
                "clip_vision_output": ["seen", 0],
                "strength": strength[1],
                "strength_type": strength[0],
            },
        ),
    }
    compare(server, Graph(family(served), nodes, {"positive": ["node", 0]}))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("served", ["anima"])
def test_model_patch_from_a_file(served, place, server, family_checkpoints):
    assert served not in family_checkpoints, family_checkpoints[served]
    made = {
        "made": {"class_type": "TestModelPatch", "inputs": {"kind": "lllite", "seed": 3}},
        "saved": {"class_type": "TestSaveModelPatch", "inputs": {"model_patch": ["made", 0], "name": LLLITE}},
    }
    server.run(made, timeout=60).check()
    inputs = {"model_patch": ["file", 0], "image": ["image", 0], "strength": 3.0, "start_percent": 0.0, "end_percent": 1.0}
    nodes = {
        "file": ("ModelPatchLoader", {"name": LLLITE}),
        "image": ("TestImage", {"seed": 4, "width": 128, "height": 128, "frames": 1}),
    }
    compare(server, Graph(family(served), nodes, settings={place: [("AnimaLLLiteApply", inputs)]}))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_infinite_talk(place, server):
    base = lambda **settings: wan_prompt(ckpt="wan_160", **settings)  # noqa: E731
    talk = {
        **PAIR,
        "mode": "single_speaker",
        "model_patch": ["network", 0],
        "vae": ["vae", 0],
        "width": 64,
        "height": 64,
        "length": 9,
        "start_image": ["image", 0],
        "audio_encoder_output_1": ["voice", 2],
        "motion_frame_count": 9,
        "audio_scale": 1.5,
    }
    nodes = {
        "network": ("TestModelPatch", {"kind": "multitalk", "seed": 3}),
        "vae": ("TestCodec", {"seed": 2, "channels": 16, "space": 8, "time": 4}),
        "image": ("TestImage", {"seed": 4, "width": 64, "height": 64, "frames": 1}),
        "voice": ("TestSound", {"seed": 6, "features": "[13, 60, 768]"}),
    }
    wiring = {"positive": ["model_0", 1], "negative": ["model_0", 2], "latent_image": ["model_0", 3]}
    # The stock node takes one conditioning per call: its sound has no batch.
    compare(server, Graph(base, nodes, wiring, {"cfg": 1.0, place: [("WanInfiniteTalkToVideo", talk)]}))


def test_inpainting_controlnet(server):
    nodes = {
        "network": ("ControlNetLoader", {"control_net_name": "flux_controlnet.safetensors"}),
        "typed": ("SetUnionControlNetType", {"control_net": ["network", 0], "type": "canny/lineart/anime_lineart/mlsd"}),
        "vae": ("TestCodec", {"seed": 2, "channels": 16, "space": 8, "time": 0}),
        "image": ("TestImage", {"seed": 4, "width": 64, "height": 64, "frames": 1}),
        "node": (
            "ControlNetInpaintingAliMamaApply",
            {
                **PAIR,
                "control_net": ["typed", 0],
                "vae": ["vae", 0],
                "image": ["image", 0],
                "mask": ["image", 1],
                "strength": 0.8,
                "start_percent": 0.0,
                "end_percent": 1.0,
            },
        ),
    }
    compare(server, Graph(flux_prompt, nodes, {"positive": ["node", 0], "negative": ["node", 1]}))


@pytest.mark.parametrize("served", ["causal_wan"])
def test_autoregressive_sampling_is_refused(served, server, family_checkpoints):
    """Its sampler goes on from keys and values that the transformer kept of earlier frames."""
    assert served not in family_checkpoints, family_checkpoints[served]
    nodes = {
        "vae": ("TestCodec", {"seed": 2, "channels": 16, "space": 8, "time": 4}),
        "image": ("TestImage", {"seed": 4, "width": 80, "height": 64, "frames": 1}),
    }
    inputs = {"vae": ["vae", 0], "start_image": ["image", 0], "width": 80, "height": 64, "length": 9, "batch_size": 1}

    def build(cp: Mapping[str, Any] | None = None) -> Prompt:
        settings = {"node": "SamplerCustomAdvanced", "model_nodes": [("ARVideoI2V", inputs)]}
        prompt = family(served)(cp=cp, others=nodes, **settings)
        prompt["sampler"]["inputs"]["latent_image"] = ["model_0", 1]
        prompt["sampler_select"] = {"class_type": "SamplerARVideo", "inputs": {"num_frame_per_block": 1}}
        return prompt

    assert latent(server, build()).std() > 1e-2
    result = server.run(build(CP), timeout=120)
    assert result.status == "error", result
    assert "autoregressive" in result.error.exception_message
    assert "on_unsupported" in result.error.exception_message
