"""Real server, real queue: CFG halves, batch items and areas on groups of ranks give the latent of one process.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

from functools import partial

import pytest
from support.graphs import family_prompt
from support.node_graphs import POSITIVE, SERVED, GraphCase, assert_stock, node
from support.worlds import on_ranks

UNETS = ("sd15", "sdxl")
TRANSFORMERS = ("flux", "wan_t2v", "qwen", "z-image", "sd3", "hunyuan_video")

# CP Config -> degrees that a call of two items must have run on, for transformers and for UNets.
SETTINGS = {
    "2 ranks": ({"world_size": 2}, {"batch": 2, "sequence": 1}, {"batch": 2}),
    "2 ranks sequence": ({"world_size": 2, "batch_degree": 1}, {"batch": 1, "sequence": 2}, {"batch": 1}),
    "4 ranks": ({"world_size": 4}, {"batch": 2, "sequence": 2}, {"batch": 4}),
    "4 ranks batch 2": ({"world_size": 4, "batch_degree": 2}, {"batch": 2, "sequence": 2}, {"batch": 2}),
    "4 ranks batch 4": ({"world_size": 4, "batch_degree": 4}, {"batch": 2, "sequence": 2}, {"batch": 4}),
}
GRAPHS = {
    "cfg 7": {"cfg": 7.0, "batch": 1},
    "batch 3 without cfg": {"cfg": 1.0, "batch": 3},
    "one item": {"cfg": 1.0, "batch": 1},
    "cfg 7 batch 3": {"cfg": 7.0, "batch": 3},
}


def run(served, graph, cp, server):
    """Sample with and without; compare; return the report."""
    return assert_stock(server, GraphCase(served, settings={"steps": 2, **GRAPHS[graph]}, matters=False), cp).report


# A UNet in every setting, which has a degree of its own for them; the others in one of the five.
RUNS = [
    on_ranks(entry[0]["world_size"], served, name, id=f"{name}-{served}")
    for turn, served in enumerate((*UNETS, *TRANSFORMERS))
    for place, (name, entry) in enumerate(SETTINGS.items())
    if served == UNETS[0] or (turn + place) % len(SETTINGS) == 0
]


@pytest.mark.parametrize(("served", "setting", "world"), RUNS)
def test_cfg_equals_one_process(served, setting, world, server, family_checkpoints):
    cp, transformer, unet = SETTINGS[setting]
    report = run(served, "cfg 7", cp, server)
    degrees = {**report["degrees"], "sequence": report["degrees"]["ring"] * report["degrees"]["ulysses"]}
    expected = unet if served in UNETS else transformer
    assert {name: degrees[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("served", "graph", "cp", "batch", "world"),
    [
        # Three items on two ranks: the sequence is shared instead, or a UNet's ranks compute two and one.
        on_ranks(2, "flux", "batch 3 without cfg", {"world_size": 2}, 1),
        on_ranks(2, "sdxl", "batch 3 without cfg", {"world_size": 2}, 2),
        on_ranks(3, "flux", "batch 3 without cfg", {"world_size": 3}, 3),
        on_ranks(2, "sd15", "one item", {"world_size": 2}, 2),
        on_ranks(4, "flux", "one item", {"world_size": 4, "batch_degree": 2, "ulysses_degree": 2}, 1),
        on_ranks(4, "wan_t2v", "cfg 7 batch 3", {"world_size": 4}, 2),
        on_ranks(4, "sd15", "cfg 7 batch 3", {"world_size": 4}, 4),
    ],
)
def test_what_does_not_divide(served, graph, cp, batch, world, server, family_checkpoints):
    assert run(served, graph, cp, server)["degrees"]["batch"] == batch


AREAS = {
    "left": node("ConditioningSetAreaPercentage", conditioning=POSITIVE, width=0.5),
    "right": node("ConditioningSetAreaPercentage", conditioning=POSITIVE, width=0.5, x=0.5),
    "both": node("ConditioningCombine", conditioning_1=["left", 0], conditioning_2=["right", 0]),
}


@pytest.mark.parametrize(("served", "world"), [on_ranks(2, "sdxl"), on_ranks(3, "flux")])
def test_areas_share_the_batch(served, world, server, family_checkpoints):
    """Two areas of the same size in one call, the negative condition of the whole picture in another."""
    graph = partial(family_prompt, SERVED[served][1], cfg=7.0)
    assert_stock(server, GraphCase(graph, AREAS, {"positive": ["both", 0]}), {"world_size": world})
