"""Patches of transformers that no table lists: the ranks run them on all tokens, and the first call is compared with one device."""

from functools import partial

import pytest
from support import families
from support.graphs import GUIDED_FLUX, family_prompt, wan_prompt
from support.latents import assert_close, differ
from support.modes import SEQUENCE, by_turns, in_modes

GRAPHS = {
    "flux": partial(GUIDED_FLUX, width=72, height=104, tokens=13, steps=4),
    "wan": partial(wan_prompt, cfg=4.0, width=72, height=56, steps=4),
    "qwen": partial(family_prompt, families.served()["qwen"][1], cfg=4.0, steps=4),
}
MODELS = {
    **dict.fromkeys(("replaced_block", "forward", "injected"), ("flux", "wan", "qwen")),
    **dict.fromkeys(("mean", "picture", "cached_block", "decides_by_tokens"), ("wan", "qwen")),
    "queries": ("flux", "wan"),
    **dict.fromkeys(("attention_output", "image_only", "written_options"), ("flux",)),
    **dict.fromkeys(("fewer_blocks", "method", "outer_forward"), ("wan",)),
}
BY_COUNT = {count: [(kind, models) for kind, models in MODELS.items() if len(models) == count] for count in (3, 2, 1)}
CASES = [
    case
    for count, kinds in BY_COUNT.items()
    for case in in_modes([(model, kind) for kind, models in kinds for model in models], variants=count)
]


def nodes(kind):
    return [("TestOnTokens", {"kind": kind})]


@pytest.mark.parametrize("served", ["qwen"])
@pytest.mark.parametrize(("mode", "model", "kind"), CASES)
def test_latent_equals_the_stock_graph(model, kind, mode, served, server, family_checkpoints):
    graph = GRAPHS[model]
    expected, plain = (server.sample_once(graph(model_nodes=each)) for each in (nodes(kind), []))
    assert differ(expected, plain)
    assert_close(server.sample(graph(cp=SEQUENCE[mode], model_nodes=nodes(kind)), timeout=120), expected)
    assert_close(server.sample(graph(cp=SEQUENCE[mode])), plain)


@pytest.mark.parametrize("kind", ["noted_on_the_model", "read_off_the_model"])
def test_notes_on_the_model_last_as_in_the_stock_graph(kind, server):
    """A function in ComfyUI's process reads them, and the next run goes on with them."""
    graph, runs = GRAPHS["wan"], []
    for cp in (None, {"world_size": 2}):
        server.free_first()
        runs.append([server.sample(graph(cp=cp, model_nodes=nodes(kind)), timeout=240) for _ in range(2)])
    server.free_first()
    for stock, sharded in zip(*runs, strict=True):
        assert_close(sharded, stock)
    assert (kind == "noted_on_the_model") == differ(*runs[0])


def test_what_a_stock_run_has_injected_is_not_of_the_model(server):
    graph, kind = GRAPHS["wan"], nodes("injected")
    expected, plain = (server.sample_once(graph(model_nodes=each)) for each in (kind, []))
    for cp, given, latent in ((None, kind, expected), ({"world_size": 2}, [], plain), (None, kind, expected)):
        assert_close(server.sample(graph(cp=cp, model_nodes=given)), latent)


def test_the_report_says_what_is_as_slow_as_on_one_device(server):
    prompt = GRAPHS["wan"](cp={"world_size": 2}, node="CPSampler", model_nodes=nodes("mean"))
    report = server.run(prompt, timeout=120).check().report
    assert report["on_all_tokens"] == ["TestOnTokens"]


REFUSED = {
    "by_rank": "compute something else with that than one device",
    "raises": "raised ValueError: this needs the main process",
    "raises_on_rank_1": "raised ValueError: this needs the first process",
    "runs_on_rank_0": "does not run the same blocks on all workers",
    "injected_class": "injected code changes the class of blocks.0",
    "injected_count": "injected code notes something whenever it is injected",
    "injected_with_a_wrapper": "injects code into the model, which other nodes' code may look for",
    "injected_raises": "raised ValueError: this needs the main process",
    "injected_hook": "injected code put a hook on the transformer",
    "injected_forward": "injected code replaced the forward of the transformer",
    "injected_weights": "injected code changes the weights of blocks.0.ffn.0",
    "injected_modules": "injected code replaced blocks.0.ffn, and has modules inside that may lack tokens",
}
"""None may leave the others waiting."""


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind, server):
    prompt = GRAPHS["wan"](cp={"world_size": 2, "batch_degree": 1}, model_nodes=nodes(kind))
    server.fails(prompt, REFUSED[kind], "if a call cannot be split", timeout=120)


@pytest.mark.parametrize("kind", by_turns(REFUSED, 4))
def test_after_a_refusal(kind, server):
    graph, cp = GRAPHS["wan"], {"world_size": 2, "batch_degree": 1}
    server.fails(graph(cp=cp, model_nodes=nodes(kind)), timeout=120)
    expected = server.sample(graph(model_nodes=nodes(kind)))
    assert_close(server.sample(graph(cp={**cp, "on_unsupported": "single device"}, model_nodes=nodes(kind)), timeout=120), expected)
    server.sample(graph(cp=cp))


def test_a_block_with_patches_of_its_own(server):
    """They would get a rank's tokens: refused in the step that has them, which is not compared."""
    cp = {"world_size": 2, "batch_degree": 1}
    server.fails(GRAPHS["flux"](cp=cp, model_nodes=nodes("own_options")), "gives a block patches of its own", timeout=120)
    server.sample(GRAPHS["flux"](cp=cp))


def test_stages_have_no_call_with_all_tokens(server):
    cp = {"world_size": 2, "weights": "staged"}
    server.fails(
        GRAPHS["wan"](cp=cp, model_nodes=nodes("mean")),
        "needs all tokens at once",
        "Set “where the model is kept” of CP Config to auto",
    )
