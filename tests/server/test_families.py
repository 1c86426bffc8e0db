"""Real server: every family's tiny model, the latent computed by several ranks equals the one of the stock graph.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

import pytest
from support import families
from support.faults import note
from support.graphs import family_prompt
from support.latents import assert_close

from cp_runtime.families import PLANS

SERVED = families.served()

# An odd number of ranks, both halves of CFG and a batch; tests/ranks has every case of the forward, at 2 ranks or at 3.
WORLD = 3
GUIDED = {"cfg": 4.0, "batch": 2}


def test_every_family_is_served():
    covered = {model.cls for _, _, model in SERVED.values()}
    here = {name for name, plan in PLANS.items() if families.exists(plan.since)}
    assert sorted(here - covered) == []


def test_names_are_unique():
    assert len(SERVED) == sum(len(families.load(name).SERVED) for name in families.NAMES)


@pytest.mark.parametrize("served", SERVED, ids=[f"{module}-{name}" for name, (module, *_) in SERVED.items()])
@pytest.mark.ranks(WORLD)
def test_latent_equals_the_stock_graph(served, server, family_checkpoints):
    assert served not in family_checkpoints, family_checkpoints[served]
    _, entry, model = SERVED[served]
    plan = PLANS[model.cls]
    settings = {**GUIDED, **({"batch": 1} if entry.single else {})}
    expected = stock_latents(entry, settings, server)

    # Without a batch axis, so that the sequence is what the ranks share.
    cp = {"world_size": WORLD, "batch_degree": 1 if plan.shares_sequence else 0}
    result = server.run(family_prompt(entry, node="CPSampler", cp=cp, **settings), timeout=120).check()
    latents = server.latents(result)
    report = result.report
    assert (report["family"], report["world_size"]) == (plan.family, WORLD)
    assert [rank["pid"] for rank in report["ranks"]] == server.worker_pids()
    if plan.shares_sequence:
        for rank in report["ranks"]:
            assert any(rank["tokens"].values()), report["ranks"]
        assert report["communication"]["bytes"] > 0

    assert latents.keys() == expected.keys()
    for name, stock in expected.items():
        assert_close(latents[name], stock)


PLACES = [
    pytest.param(world, weights, dtype, marks=pytest.mark.ranks(world), id=f"{world} ranks, {weights}, {dtype}")
    for world in (2, 3, 4)
    for weights, dtype in (("sharded", "default"), ("offloaded", "default"), ("sharded", "fp8_e4m3fn"))
]


@pytest.mark.soak  # tests/ranks has every family in one mode
@pytest.mark.parametrize(("world", "weights", "dtype"), PLACES)
@pytest.mark.parametrize("served", SERVED)
def test_shared_weights_give_the_latent_of_whole_ones(served, world, weights, dtype, server, family_checkpoints):
    assert served not in family_checkpoints, family_checkpoints[served]
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
    off = max(((found[name] - whole).abs().max() / whole.std()).item() for name, whole in expected.items())
    note(f"48 shared weights: every family, {world} ranks", "difference in standard deviations", 1e-5, off)
    assert off <= 1e-5


def stock_latents(entry, settings, server):
    """The latents without context parallelism."""
    logged = len(server.log_text())
    result = server.run(family_prompt(entry, **settings), timeout=120)
    log = server.log_text()[logged:]
    # The file must be the whole model.
    assert "unet missing" not in log
    assert "unet unexpected" not in log
    return server.latents(result)
