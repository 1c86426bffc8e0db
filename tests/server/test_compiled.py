"""Torch Compile on a real server: the blocks are compiled on the ranks, and the latents are those of a graph without it."""

from __future__ import annotations

import json

import pytest
from support.graphs import wan_prompt

CP = {"world_size": 2, "ulysses_degree": 2}
TOLERANCE = 1e-4  # of three steps, each of which adds to what comes before


def same(out, expected):
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


@pytest.fixture(scope="module")
def stock(server):
    return server.latent(server.run(wan_prompt()).check())


def run(server, **settings):
    """The latent, and what the report says about compiled blocks."""
    result = server.run(wan_prompt(node="CPSampler", **settings), timeout=300).check()
    return server.latent(result), json.loads(result.outputs["report"]["text"][0])["compiled"]


def test_the_node_of_comfyui_in_front_of_the_sampler(server, stock):
    """Compiled by inductor in the first step; and again with less text, without compiling anything."""
    nodes = {"after_apply": [("TorchCompileModel", {"backend": "inductor"})]}
    out, first = run(server, cp=CP, **nodes)
    same(out, stock)
    assert first["kinds"] == {"WanAttentionBlock": 2}
    assert (first["left"], first["breaks"]) == ({}, 0)
    pids = server.worker_pids()
    out, second = run(server, tokens=13, cp=CP, **nodes)
    same(out, server.latent(server.run(wan_prompt(tokens=13)).check()))
    assert second == first
    assert server.worker_pids() == pids


def test_a_node_that_names_blocks_and_a_graph_without_it(server, stock):
    """In front of Apply Context Parallel; the same workers compute without what was compiled in the next prompt."""
    out, compiled = run(server, cp=CP, model_nodes=[("TestPatch", {"kind": "compile_eager"})])
    same(out, stock)
    assert compiled["kinds"] == {"WanAttentionBlock": 2}
    pids = server.worker_pids()
    out, compiled = run(server, cp=CP)
    same(out, stock)
    assert compiled["kinds"] == {}
    assert server.worker_pids() == pids


def test_one_device_compiles_as_without_the_pack(server):
    """Another node makes the graph run on one device, where ComfyUI's own wrapper compiles."""
    nodes = {"after_apply": [("TestPatch", {"kind": "compile_eager"}), ("TestPatch", {"kind": "attention_override"})]}
    expected = server.latent(server.run(wan_prompt(**nodes), timeout=120).check())
    out = server.latent(server.run(wan_prompt(cp={**CP, "on_unsupported": "single device"}, **nodes), timeout=120).check())
    assert (out == expected).all()
