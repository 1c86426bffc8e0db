"""A server of a ComfyUI that has what later versions brought (`support.next_comfyui`): attention of the model file, and sparse.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

import ast
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import checkpoint_of, version
from support.modes import by_turns
from support.next_comfyui import make_comfyui
from support.node_graphs import SERVED, GraphCase, assert_stock, completed
from support.server import ComfyServer

from cp_runtime.comfyui import TESTED

pytestmark = pytest.mark.skipif(version() != TESTED[0], reason="the copy is made of the oldest version that is tested")
MODEL = "model.diffusion_model."
INT8, SOL = {"attention": "comfy_kitchen_int8"}, {"attention": "comfy_kitchen_sol", "tau": 0.25}
SPARSE, H3, WAN = "BlockSparseAttention", "minimax", "wan_t2v"
SHARDED = {"world_size": 2, "weights": "sharded", "ranks_per_call": "all"}


@pytest.fixture(scope="module")
def server(comfyui_path, checkpoints_dir, tmp_path_factory):
    root = make_comfyui(comfyui_path, tmp_path_factory.mktemp("next"))
    with ComfyServer(root, models=checkpoints_dir, forked=False) as running:
        yield running


@pytest.fixture
def file(served, checkpoints_dir, family_checkpoints):
    """Write the checkpoint again, with more entries, and with what its model is made with; return the file's name."""

    def write(name, entries, **made_with):
        folder = checkpoints_dir / "diffusion_models"
        with safe_open(source := folder / checkpoint_of(SERVED[served][1]), "pt") as opened:
            model = ast.literal_eval(opened.metadata()["test_model"])
        model["unet_config"] |= made_with
        if not (folder / name).exists():
            save_file(load_file(source) | entries, folder / name, metadata={"test_model": repr(model)})
        return name

    return write


def entry(config):
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def chosen(layers):
    return {f"{MODEL}{layer}.comfy_attention.config": entry(config) for layer, config in layers.items()}


def loading(served, name, **settings):
    """The family's graph with another file."""

    def change(prompt):
        prompt["loader"]["inputs"]["unet_name"] = name

    return GraphCase(served, change=change, **settings)


LAYERS = {
    "rounded": {"blocks.0.self_attn": INT8, "blocks.1.self_attn": INT8},
    "sparse": {"blocks.0.self_attn": SOL, "blocks.1.self_attn": {**SOL, "tau": 0.75}},
}
PLACES = [
    pytest.param(SHARDED, id="2 ranks, sharded"),
    pytest.param({"world_size": 3}, marks=(pytest.mark.soak, pytest.mark.ranks(3)), id="3 ranks"),
]


@pytest.mark.parametrize("cp", PLACES)
@pytest.mark.parametrize("kind", by_turns(LAYERS, 2))
@pytest.mark.parametrize("served", [WAN])
def test_layers_attend_as_the_model_file_says(served, kind, cp, server, file):
    assert_stock(server, loading(served, file(f"next-{kind}.safetensors", chosen(LAYERS[kind]))), {**cp, "batch_degree": 1})


@pytest.mark.parametrize("served", [WAN])
def test_a_node_comes_before_the_model_file(served, server, file):
    backend = {"model_nodes": [("TestAttention", {"kind": "backend", "name": "pytorch"})]}
    case = loading(served, file("next-rounded.safetensors", chosen(LAYERS["rounded"])), settings=backend, matters=False)
    assert_stock(server, case, SHARDED)


def sparse(method, **inputs):
    return [(SPARSE, {"method": method, "start_percent": 0.3, "dense_blocks": "1", **inputs})]


GATE = {f"{MODEL}blocks.{block}.attn.to_gate_compress.weight": torch.randn(96, 96) / 96**0.5 for block in range(2)}


@pytest.mark.parametrize("cp", PLACES)
@pytest.mark.parametrize("method", ["sol-attn", "sla", "vsa"])
@pytest.mark.parametrize("served", [H3])
def test_blocks_of_all_tokens_are_chosen_for_every_head(served, method, cp, server, file):
    name = file("next-gated.safetensors", GATE, gate_compress=True)
    settings = {"steps": 3, "model_nodes": sparse(method, dense_blocks="" if method == "sla" else "1")}
    assert_stock(server, loading(served, name, settings=settings), cp)


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize("served", [WAN])
def test_sparse_attention_of_any_model_over_a_chosen_one(served, place, server, family_checkpoints):
    nodes = [("TestAttention", {"kind": "backend", "name": "split"}), *sparse("sla", start_percent=0.0)]
    assert_stock(server, GraphCase(served, settings={place: nodes}), {**SHARDED, "batch_degree": 1})


@pytest.mark.parametrize(
    ("cp", "before", "words"),
    [
        ({"ring_degree": 2}, [], ["Model Sparse Attention", "all tokens of a head", "“split of a call: ring” of CP Config is 2"]),
        ({}, [("TorchCompileModel", {"backend": "inductor"})], ["compiled blocks", "Remove Torch Compile"]),
    ],
    ids=["ring", "compiled"],
)
@pytest.mark.parametrize("served", [WAN])
def test_refused_by_name(served, cp, before, words, server, family_checkpoints):
    case = GraphCase(served, settings={"model_nodes": [*before, *sparse("sla")]})
    server.fails(completed(case.build(cp={"world_size": 2, **cp}), server), *words)
