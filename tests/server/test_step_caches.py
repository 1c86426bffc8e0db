"""Step caches of node packs: they run on the ranks around sharded blocks, and their notes are in ComfyUI's process as well."""

from functools import partial

import pytest
from support import families
from support.graphs import GUIDED_FLUX, family_prompt, wan_prompt
from support.latents import assert_close, differ
from support.modes import SEQUENCE, in_modes

GRAPHS = {
    "flux": partial(GUIDED_FLUX, width=72, height=104, tokens=13, steps=6),
    "wan": partial(wan_prompt, cfg=4.0, width=72, height=56, steps=6),
    "qwen": partial(family_prompt, families.served()["qwen"][1], cfg=4.0, steps=6),
}
SHAPES = {
    "flux": ("tea_cache", "first_block_cache", "around_forward"),
    "wan": ("tea_cache", "first_block_cache", "around_forward"),
    "qwen": ("first_block_cache", "around_forward"),
}


def nodes(shape):
    return [("TestStepCache", {"shape": shape})]


@pytest.mark.parametrize("served", ["qwen"])
@pytest.mark.parametrize(
    ("mode", "model", "shape"), in_modes([(model, shape) for model, shapes in SHAPES.items() for shape in shapes])
)
def test_latent_equals_the_stock_graph(model, shape, mode, served, server, family_checkpoints):
    """Also in a second run, which begins with what the first one has left, as the stock graph does."""
    graph = GRAPHS[model]
    expected, plain = (server.sample_once(graph(model_nodes=each)) for each in (nodes(shape), []))
    assert differ(expected, plain)
    for _ in range(2):
        assert_close(server.sample(graph(cp=SEQUENCE[mode], model_nodes=nodes(shape)), timeout=240), expected)
    assert_close(server.sample(graph(cp=SEQUENCE[mode])), plain)


def test_notes_last_from_run_to_run_and_are_gone_with_the_workers(server):
    """A cache that nobody resets goes on in the next run, as in the stock graph. Its tensors are on the workers: after their
    restart it begins anew."""
    graph, cp = GRAPHS["flux"], {"world_size": 2}
    server.free_first()
    stock = [server.sample(graph(model_nodes=nodes("lasting"))) for _ in range(2)]
    assert differ(*stock)
    server.free_first()
    for expected in stock:
        assert_close(server.sample(graph(cp=cp, model_nodes=nodes("lasting")), timeout=240), expected)
    server.post("/context_parallel/restart", timeout=240)
    assert_close(server.sample(graph(cp=cp, model_nodes=nodes("lasting")), timeout=240), stock[0])
    server.free_first()
