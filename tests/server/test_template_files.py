"""Node classes of ComfyUI's templates that load a second file beside the model: style models, model patches, ControlNets."""

from functools import partial

import pytest
import safetensors.torch
import torch
from support.graphs import flux_prompt, wan_prompt
from support.node_graphs import BOTH, IMAGE, MASK, POSITIVE, GraphCase, assert_stock, codec, completed, node, picture, sound, vision

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


@pytest.mark.parametrize("served", ["flux_redux"])
@pytest.mark.parametrize("strength", [("multiply", 0.8), ("attn_bias", 0.5)], ids=["multiply", "attn_bias"])
def test_style_model(strength, served, server, family_checkpoints, style_model):
    kind, number = strength
    applied = node("StyleModelApply", conditioning=POSITIVE, clip_vision_output=["seen", 0], strength=number, strength_type=kind)
    style = {"style_model": node("StyleModelLoader", style_model_name=style_model), "seen": vision(9, 1152), "node": applied}
    assert_stock(server, GraphCase(served, style, {"positive": ["node", 0]}))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("served", ["anima"])
def test_model_patch_from_a_file(served, place, server, family_checkpoints):
    made = {
        "made": {"class_type": "TestModelPatch", "inputs": {"kind": "lllite", "seed": 3}},
        "saved": {"class_type": "TestSaveModelPatch", "inputs": {"model_patch": ["made", 0], "name": LLLITE}},
    }
    server.run(made, timeout=60).check()
    nodes = {"model_patch": node("ModelPatchLoader", name=LLLITE), "image": picture(128, 128)}
    assert_stock(server, GraphCase(served, nodes, settings={place: [node("AnimaLLLiteApply", strength=3.0)]}))


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_infinite_talk(place, server):
    # The stock node takes one conditioning per call: its sound has no batch.
    graph = partial(wan_prompt, ckpt="wan_160", cfg=1.0, node="CPSampler")
    nodes = {
        "model_patch": node("TestModelPatch", kind="multitalk", seed=3),
        "vae": codec(16),
        "image": picture(64, 64),
        "voice": sound(features=(13, 60, 768)),
    }
    talk = dict(mode="single_speaker", width=64, height=64, length=9, audio_encoder_output_1=["voice", 2], audio_scale=1.5)
    talking = node("WanInfiniteTalkToVideo", start_image=IMAGE, **talk)
    wiring = {"positive": ["model_0", 1], "negative": ["model_0", 2], "latent_image": ["model_0", 3]}
    assert_stock(server, GraphCase(graph, nodes, wiring, {place: [talking]}))


def test_inpainting_controlnet(server):
    nodes = {
        "loaded": node("ControlNetLoader", control_net_name="flux_controlnet.safetensors"),
        "control_net": node("SetUnionControlNetType", control_net=["loaded", 0], type="canny/lineart/anime_lineart/mlsd"),
        "vae": codec(16, 8, 0),
        "image": picture(64, 64),
        "node": node("ControlNetInpaintingAliMamaApply", mask=MASK, strength=0.8),
    }
    assert_stock(server, GraphCase(partial(flux_prompt, cfg=3.0, node="CPSampler"), nodes, BOTH))


@pytest.mark.parametrize("served", ["causal_wan"])
def test_autoregressive_sampling_is_refused(served, server, family_checkpoints):
    """Its sampler goes on from keys and values that the transformer kept of earlier frames."""
    first_frame = node("ARVideoI2V", start_image=IMAGE, width=80, height=64, length=9)
    settings = {"node": "SamplerCustomAdvanced", "cfg": 1.0, "steps": 2, "model_nodes": [first_frame]}

    def sampler(prompt):
        prompt["sampler_select"] = {"class_type": "SamplerARVideo", "inputs": {"num_frame_per_block": 1}}

    nodes = {"vae": codec(16), "image": picture(80, 64)}
    case = GraphCase(served, nodes, {"latent_image": ["model_0", 1]}, settings, change=sampler)
    assert server.sample(completed(case.build(), server), timeout=300).std() > 1e-2
    parallel = completed(case.build(cp={"world_size": 2, "batch_degree": 1}), server)
    server.fails(parallel, "autoregressive", "if a call cannot be split", timeout=120)
