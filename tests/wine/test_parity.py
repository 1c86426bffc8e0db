"""Ranks of Windows give the stock graph's latents, through the API queue of a ComfyUI of Windows."""

from functools import partial

import pytest
from support.graphs import flux_prompt, wan_prompt
from support.node_graphs import GraphCase, assert_stock
from support.vae_graphs import vae_prompt

FLUX = partial(flux_prompt, cfg=4.0, batch=2)
WAN = partial(wan_prompt, width=72, height=56, frames=5, tokens=15, cfg=4.0)
MODES = {
    "auto": {"world_size": 2},
    "ulysses": {"world_size": 2, "ulysses_degree": 2},
    "ring": {"world_size": 2, "ring_degree": 2},
    "cfg": {"world_size": 2, "batch_degree": 2},
    "sharded": {"world_size": 2, "weights": "sharded"},
    "offloaded": {"world_size": 2, "weights": "offloaded"},
    "staged": {"world_size": 2, "weights": "staged"},
    "unified": {"world_size": 4, "ring_degree": 2, "ulysses_degree": 2},
}
CASES = [
    *((FLUX, mode) for mode in MODES),
    *((WAN, mode) for mode in ("auto", "ulysses", "ring", "cfg")),
    (partial(flux_prompt, loras=["flux_lora"]), "auto"),
    (partial(flux_prompt, ckpt="flux_fp8", loras=["flux_lora"]), "ulysses"),
    (partial(flux_prompt, node="CPSampler", attention_mask="key", tokens=13, width=72, height=104), "auto"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "mode"), CASES)
def test_latent_equals_the_stock_graph(graph, mode, server):
    assert_stock(server, GraphCase(graph, matters=False), MODES[mode])


VAES = [("wan", "decode", "exact"), ("kl", "decode", "tiles"), ("wan", "encode", "exact")]


@pytest.mark.usefixtures("family_checkpoints")
@pytest.mark.parametrize("mode", ["auto", "cfg"])
@pytest.mark.parametrize("served", ["sd15", "qwen"])
def test_latent_of_another_family_equals_the_stock_graph(served, mode, server):
    assert_stock(server, GraphCase(served, matters=False), MODES[mode])


@pytest.mark.usefixtures("vae_files")
@pytest.mark.parametrize(("name", "method", "mode"), VAES)
def test_vae_equals_the_stock_node(name, method, mode, server):
    stock = server.sample(vae_prompt(name, method, "tiled" if mode == "tiles" else "exact"))
    ours = server.sample(vae_prompt(name, method, mode, world=2))
    assert float((ours - stock).abs().max() / stock.abs().max()) <= 1e-5
