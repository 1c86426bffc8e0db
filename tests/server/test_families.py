"""Real server: every family's tiny model, the latent computed by several ranks equals the one of the stock graph.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

import re

import pytest
from support import families
from support.faults import note
from support.graphs import family_prompt
from support.latents import distance
from support.node_graphs import SERVED, GraphCase, assert_stock

from cp_runtime.families import PLANS

# Both halves of CFG and a batch: two groups get two items each, and share their tokens. tests/ranks has every case of the forward,
# at 2 ranks or at 3.
WORLD, GROUPS = 4, 2
GUIDED = {"cfg": 3.0, "batch": 2}


def test_every_family_is_served():
    covered = {model.cls for _, _, model in SERVED.values()}
    here = {name for name, plan in PLANS.items() if families.exists(plan.since)}
    assert sorted(here - covered) == []


def test_names_are_unique():
    assert len(SERVED) == sum(len(families.load(name).SERVED) for name in families.NAMES)


def entries():
    """All of them; what differs from another one in the conditions alone, `make soak` runs."""
    seen = set()
    for name, (module, entry, _) in SERVED.items():
        again = (module, entry.model) in seen
        seen.add((module, entry.model))
        yield pytest.param(name, marks=pytest.mark.soak if again else (), id=f"{module}-{name}")


@pytest.mark.parametrize("served", entries())
@pytest.mark.ranks(WORLD)
def test_latent_equals_the_stock_graph(served, server, family_checkpoints):
    _, entry, model = SERVED[served]
    plan, logged = PLANS[model.cls], len(server.log_text())
    case = GraphCase(served, settings={**GUIDED, "steps": 2, **({"batch": 1} if entry.single else {})}, matters=False)
    report = assert_stock(server, case, {"world_size": WORLD, "batch_degree": GROUPS}).report
    assert (report["family"], report["world_size"]) == (plan.family, WORLD)
    assert report["communication"]["bytes"] > 0 or not plan.shares_sequence
    # The file must be the whole model.
    assert not re.search("unet (missing|unexpected)", server.log_text()[logged:])


PLACES = [
    pytest.param(world, weights, dtype, marks=pytest.mark.ranks(world), id=f"{world} ranks, {weights}, {dtype}")
    for world in (2, 3, 4)
    for weights, dtype in (("sharded", "default"), ("offloaded", "default"), ("sharded", "fp8_e4m3fn"))
]


@pytest.mark.soak  # tests/ranks has every family in one mode
@pytest.mark.parametrize(("world", "weights", "dtype"), PLACES)
@pytest.mark.parametrize("served", SERVED)
def test_shared_weights_give_the_latent_of_whole_ones(served, world, weights, dtype, server, family_checkpoints):
    _, entry, _ = SERVED[served]

    def run(kept):
        # Of both, all ranks take part: other splits round otherwise.
        settings = {"cp": {"world_size": world, "weights": kept, "ranks_per_call": "all"}} if kept else {}
        return server.run(family_prompt(entry, weight_dtype=dtype, batch=1, **settings), timeout=120)

    def latents(kept):
        return server.latents(run(kept))

    if dtype != "default" and run(None).status == "error":  # some forwards compute in the dtype of a weight, also in ComfyUI
        assert run(weights).status == "error"
        return
    expected, found = latents("whole"), latents(weights)
    off = max(distance(found[name], whole) for name, whole in expected.items())
    note(f"48 shared weights: every family, {world} ranks", "difference in standard deviations", 1e-5, off)
    assert off <= 1e-5
