"""Torch Compile on a real server: the blocks are compiled on the ranks, and the latents are those of a graph without it."""

from __future__ import annotations

import pytest
from support.graphs import wan_prompt

CP = {"world_size": 2, "ulysses_degree": 2}
TOLERANCE = 1e-4  # of three steps, each of which adds to what comes before


def same(out, expected):
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


@pytest.fixture(scope="module")
def stock(server):
    return server.latent(server.run(wan_prompt()).check())


def test_the_node_of_comfyui_in_front_of_the_sampler(server, stock):
    """Compiled by inductor; and again with other text, without compiling anything."""
    nodes = {"after_apply": [("TorchCompileModel", {"backend": "inductor"})]}
    same(server.latent(server.run(wan_prompt(cp=CP, **nodes), timeout=300).check()), stock)
    pids = server.worker_pids()
    same(
        server.latent(server.run(wan_prompt(tokens=13, cp=CP, **nodes)).check()),
        server.latent(server.run(wan_prompt(tokens=13)).check()),
    )
    assert server.worker_pids() == pids
    assert "run as they are" not in server.log_text()


def test_a_node_that_names_blocks_and_a_graph_without_it(server, stock):
    """In front of Apply Context Parallel; the same workers compute without what was compiled in the next prompt."""
    nodes = {"model_nodes": [("TestPatch", {"kind": "compile_eager"})]}
    same(server.latent(server.run(wan_prompt(cp=CP, **nodes), timeout=120).check()), stock)
    pids = server.worker_pids()
    same(server.latent(server.run(wan_prompt(cp=CP)).check()), stock)
    assert server.worker_pids() == pids


def test_one_device_compiles_as_without_the_pack(server):
    """Another node makes the graph run on one device, where ComfyUI's own wrapper compiles."""
    nodes = {"after_apply": [("TestPatch", {"kind": "compile_eager"}), ("TestPatch", {"kind": "attention_override"})]}
    expected = server.latent(server.run(wan_prompt(**nodes), timeout=120).check())
    out = server.latent(server.run(wan_prompt(cp={**CP, "on_unsupported": "single device"}, **nodes), timeout=120).check())
    assert (out == expected).all()
