"""Patches of UNets that no table lists: the ranks run them. What they would make another picture of is refused by name."""

from functools import partial

import pytest
from support import families
from support.faults import SOAK
from support.graphs import family_prompt
from support.latents import assert_close, differ
from support.modes import by_turns, in_modes


def unet(name, **settings):
    _, entry, _ = families.served()[name]
    return partial(family_prompt, entry, cfg=4.0, steps=3, **settings)


GRAPHS = {"sd15": unet("sd15", batch=2), "sdxl": unet("sdxl"), "svd": unet("svd")}
RUN = (
    "picture",
    "closures",
    "layer",
    "wrapped",
    "by_step",
    "block",
    "settings",
    "injected",
    "decorated",
    "outer_forward",
    "inner_forward",
    "own_model",
    "layers",
)
MODES = {
    "2 ranks": {"world_size": 2},
    "3 ranks": {"world_size": 3},
    "sharded": {"world_size": 2, "weights": "sharded"},
    "4 ranks": {"world_size": 4, "batch_degree": 2},
}


def nodes(kind):
    return [("TestUnlisted", {"kind": kind})]


@pytest.mark.parametrize(
    ("mode", "kind", "served"), in_modes([(kind, served) for kind in RUN for served in GRAPHS], MODES, len(GRAPHS))
)
def test_latent_equals_the_stock_graph(kind, served, mode, server, family_checkpoints):
    graph = GRAPHS[served]
    expected, plain = (server.sample_once(graph(model_nodes=each)) for each in (nodes(kind), []))
    assert differ(expected, plain)
    places = ("model_nodes", "after_apply")
    for place in places if SOAK else (places[RUN.index(kind) % 2],):
        assert_close(server.sample(graph(cp=MODES[mode], **{place: nodes(kind)}), timeout=120), expected)
    assert_close(server.sample(graph(cp=MODES[mode])), plain)


WHOLE = (
    *("mixes_halves", "needs_halves", "state", "cached", "noted", "noted_in_a_dict", "noted_later", "in_a_global", "in_place"),
    *("enum", "counter", "another_dict", "noted_expanded"),
)


@pytest.mark.parametrize(
    ("mode", "kind", "served"), in_modes([(kind, served) for kind in WHOLE for served in GRAPHS], MODES, len(GRAPHS))
)
def test_patches_that_need_the_whole_batch(kind, served, mode, server, family_checkpoints):
    """They note something, or mix halves of CFG: from then on every rank computes the whole batch."""
    graph = partial(GRAPHS[served], model_nodes=nodes(kind), steps=5)
    expected = server.sample_once(graph())
    result = server.run(graph(cp=MODES[mode], node="CPSampler"), timeout=240).check()
    assert_close(server.latent(result), expected)
    assert result.report["on_whole_batch"] == ["TestUnlisted"] or (mode == "sharded" and "halves" in kind)  # which has it anyway


@pytest.mark.parametrize("kind", ["in_place", "cached"])
@pytest.mark.parametrize("served", ["sd15"])
def test_the_next_sampling_of_a_patched_model(kind, served, server, family_checkpoints):
    """It begins with the whole batch, and with what the first one has noted."""
    latents = []
    for cp in (None, {"world_size": 2}):
        prompt = GRAPHS[served](model_nodes=nodes(kind), cp=cp)
        first = prompt["sampler"]["inputs"]
        prompt["second"] = {"class_type": "KSampler", "inputs": {**first, "latent_image": ["sampler", 0], "denoise": 0.8}}
        prompt["save"]["inputs"]["samples"] = ["second", 0]
        latents.append(server.sample(prompt, timeout=120))
    assert_close(latents[1], latents[0])


@pytest.mark.parametrize("kind", ["method", "hook"])
@pytest.mark.parametrize("served", ["sd15"])
def test_a_block_that_a_node_has_changed_for_good(kind, served, server, family_checkpoints):
    graph = GRAPHS[served]
    plain = server.sample_once(graph())
    server.free_first()  # a patch of an earlier test leaves the block when another model is loaded, and takes the change along
    changed = [("TestUnlistedForGood", {"kind": kind})]
    try:
        expected = server.sample(graph(model_nodes=changed))
        out = server.sample(graph(cp={"world_size": 2}), timeout=120)
    finally:
        server.run(graph(model_nodes=[("TestUnlistedUndone", {})])).check()
    assert_close(out, expected)
    assert differ(expected, plain)
    assert_close(server.sample(graph(cp={"world_size": 2})), plain)


@pytest.mark.parametrize("policy", ["error", "single device"])
@pytest.mark.parametrize("served", ["sd15"])
def test_what_goes_wrong_later_is_an_error(policy, served, server, family_checkpoints):
    """Also where one device could go on: steps before may be wrong as well."""
    graph = partial(GRAPHS[served], steps=4, cp={"world_size": 2, "on_unsupported": policy})
    server.fails(graph(model_nodes=nodes("late")), "compute something else with that than one device", "Earlier steps")
    server.sample(graph())


REFUSED = {
    "random": "draws random numbers",
    "random_later": "draws random numbers",
    "asks": "it uses memory_usage_factor of the model, which the workers do not have",
    "asks_for_the_class": "TestUnlisted patched the transformer, and looks at the class of the model",
    "noted_on_the_patcher": "the workers' model has no test_calls",
    "partial": "TestUnlisted patched the transformer, and that fails on the workers",
    "on_a_class": "note something where only their own process sees it",
    "uuids": "reads uuids of transformer_options",
    "random_of_numpy": "draws random numbers",
    "says_itself": "SaysItself, whose class says itself what of it is sent",
    "proxy": "something of it cannot be made there (RecursionError",
    "written_options": "writes mean into transformer_options on the workers, where code of another node may look for it",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("served", ["sd15"])
def test_refused_by_name(kind, served, server, family_checkpoints):
    """In the first call that shows it."""
    graph = partial(GRAPHS[served], steps=4, cp={"world_size": 2})
    server.fails(graph(model_nodes=nodes(kind)), REFUSED[kind], "if a call cannot be split")


@pytest.mark.parametrize("kind", by_turns(REFUSED, 4))
@pytest.mark.parametrize("served", ["sd15"])
def test_after_a_refusal(kind, served, server, family_checkpoints):
    """The ranks go on. On one device it is what ComfyUI makes of it."""
    graph, cp = partial(GRAPHS[served], steps=4), {"world_size": 2}
    server.fails(graph(cp=cp, model_nodes=nodes(kind)))
    pids = server.worker_pids()
    expected = server.sample(graph(model_nodes=nodes(kind)))
    assert_close(server.sample(graph(cp={**cp, "on_unsupported": "single device"}, model_nodes=nodes(kind))), expected)
    server.sample(graph(cp=cp))
    assert server.worker_pids() == pids


@pytest.mark.parametrize("served", ["sd15"])
def test_a_patch_that_interrupts_the_prompt(served, server, family_checkpoints):
    """As in the stock graph, and the ranks go on."""
    graph = partial(GRAPHS[served], cp={"world_size": 2})
    server.sample(graph())
    pids = server.worker_pids()
    assert server.run(graph(model_nodes=nodes("interrupts"))).status == "interrupted"
    server.sample(graph())
    assert server.worker_pids() == pids
