"""Real server: every family's tiny model, the latent computed by several ranks equals the one of the stock graph.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

import json

import pytest
from support import families
from support.graphs import family_prompt

from cp_runtime.families import PLANS

TOLERANCE = 2e-4
SERVED = families.served()

# As the entry says, and with both halves of CFG and a batch.
WAYS = {"plain": {}, "cfg batch": {"cfg": 4.0, "batch": 2}}

# Class -> why no graph on a server can sample it.
UNSERVED: dict[str, str] = {}

_stock: dict[tuple[str, str], dict] = {}


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def world(request):
    return request.param


def test_every_family_is_served():
    covered = {model.cls for _, _, model in SERVED.values()}
    assert sorted(PLANS.keys() - covered - UNSERVED.keys()) == []


def test_names_are_unique():
    assert len(SERVED) == sum(len(families.load(name).SERVED) for name in families.NAMES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("served", SERVED, ids=[f"{module}-{name}" for name, (module, *_) in SERVED.items()])
def test_latent_equals_the_stock_graph(served, way, world, server, family_checkpoints):
    assert served not in family_checkpoints, family_checkpoints[served]
    _, entry, model = SERVED[served]
    plan = PLANS[model.cls]
    expected = stock_latents(served, way, server)

    # Without a batch axis, so that the sequence is what the ranks share.
    cp = {"world_size": world, "batch_degree": 1 if plan.shares_sequence else 0}
    result = server.run(family_prompt(entry, node="CPSampler", cp=cp, **options(entry, way)), timeout=120).check()
    latents = latents_of(result, server)
    report = json.loads(result.outputs["report"]["text"][0])
    assert (report["family"], report["world_size"]) == (plan.family, world)
    assert [rank["pid"] for rank in report["ranks"]] == server.worker_pids()
    if plan.shares_sequence:
        for rank in report["ranks"]:
            assert any(rank["tokens"].values()), report["ranks"]
        assert report["communication"]["bytes"] > 0

    assert latents.keys() == expected.keys()
    for name, stock in expected.items():
        assert latents[name].shape == stock.shape
        assert stock.std() > 1e-2
        assert (latents[name] - stock).abs().max() / stock.std() <= TOLERANCE


def options(entry, way):
    return {**WAYS[way], **({"batch": 1} if entry.single else {})}


def stock_latents(served, way, server):
    """The latents without context parallelism, sampled once."""
    if (served, way) not in _stock:
        logged = len(server.log_text())
        result = server.run(family_prompt(SERVED[served][1], **options(SERVED[served][1], way)), timeout=120)
        log = server.log_text()[logged:]
        _stock[served, way] = latents_of(result.check(), server)
        # The file must be the whole model.
        assert "unet missing" not in log
        assert "unet unexpected" not in log
    return _stock[served, way]


def latents_of(result, server):
    return {node: server.latent(result, node) for node, output in result.outputs.items() if "latents" in output}
