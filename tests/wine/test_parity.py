"""ComfyUI under Wine: ranks of Windows give the stock graph's latents, through the API queue."""

from functools import partial

import pytest
from support.graphs import flux_prompt, wan_prompt
from support.node_graphs import GraphCase, assert_stock

GRAPHS = {
    "flux cfg": partial(flux_prompt, cfg=4.0, batch=2),
    "flux lora": partial(flux_prompt, loras=["flux_lora"]),
    "wan cfg": partial(wan_prompt, width=72, height=56, frames=5, tokens=15, cfg=4.0),
    "sd15": "sd15",
}
MODES = {
    "auto": {"world_size": 2},
    "ulysses": {"world_size": 2, "ulysses_degree": 2},
    "ring": {"world_size": 2, "ring_degree": 2},
    "batch": {"world_size": 2, "batch_degree": 2},
    "sharded": {"world_size": 2, "weights": "sharded"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_latent_equals_the_stock_graph(graph, mode, server):
    assert_stock(server, GraphCase(GRAPHS[graph], matters=False), MODES[mode])
