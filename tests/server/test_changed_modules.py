"""What a node changes in a model in place counts on the ranks as in ComfyUI, for as long as it does there: what the table of
`test_every_change` does not have."""

from functools import partial

import pytest
from support import families
from support.graphs import family_prompt
from support.latents import assert_close, differ, distance
from support.node_graphs import NodeCase, completed, node, picture
from support.vae_graphs import vae_prompt

pytestmark = pytest.mark.usefixtures("family_checkpoints", "vae_files")

CP = {"world_size": 2}
SINGLE = {**CP, "on_unsupported": "single device"}
UNDO = {"undo": {"class_type": "TestUnchanged", "inputs": {}}}
WHEN = ("before load", "between prompts", "in a call")


def of(name):
    return partial(family_prompt, families.served()[name][1])


def changed(kind, when=""):
    return {"model_nodes": [("TestChangedWhileSampling" if when == WHEN[2] else "TestChangedModel", {"kind": kind})]}


def taken_back(server, prompt):
    """The latent of a prompt whose changes are taken back at its end."""
    try:
        return server.sample(prompt)
    finally:
        server.run(UNDO).check()


@pytest.mark.parametrize("served", ["sd15"])
@pytest.mark.parametrize("when", [pytest.param(when, marks=() if when == WHEN[1] else pytest.mark.soak) for when in WHEN])
def test_seamless_pictures(served, when, server):
    """Circular padding of every convolution."""
    make = partial(of(served), steps=3)
    stock = taken_back(server, make(**changed("padding", when)))
    plain = server.sample(make(cp=CP))
    if when == "before load":
        server.free_first()
    pids = server.worker_pids()
    assert_close(taken_back(server, make(cp=CP, **changed("padding", when))), stock)
    assert differ(stock, plain)
    assert_close(server.sample(make(cp=CP)), plain)
    assert server.worker_pids() == pids


VAE_CASES = [
    pytest.param(name, mode, when, marks=() if number % 3 == 0 and turn == number // 3 else pytest.mark.soak)
    for number, (name, mode) in enumerate((("kl", "auto"), ("kl", "tiles"), ("wan", "auto"), ("taesd", "tiles")))
    for turn, when in enumerate(WHEN[:2])
]


@pytest.mark.parametrize(("name", "mode", "when"), VAE_CASES)
def test_seamless_pictures_of_a_vae(name, mode, when, server):
    """Rows that ranks share end at the picture's other end."""

    def make(mode, change=True):
        prompt = vae_prompt(name, "decode", mode, again=True)
        if change:
            prompt["changed"] = {"class_type": "TestChangedVAE", "inputs": {"vae": ["vae", 0], "kind": "padding"}}
            prompt["run"]["inputs"]["vae"] = ["changed", 0]
        return prompt

    stock = taken_back(server, make(None if mode == "auto" else "tiled"))
    plain = server.sample(make(mode, change=False))
    if when == "before load":
        server.free_first()
    assert distance(taken_back(server, make(mode)), stock) < 1e-4
    assert differ(stock, plain)
    assert distance(server.sample(make(mode, change=False)), plain) < 1e-4


# A method of an instance, in the place of the class's: its code is ComfyUI's alone, and a UNet splits no tokens; and a layer.
@pytest.mark.parametrize(("served", "kind", "loaded_again"), [("sd15", "method", False), ("flux", "activation", True)])
def test_a_model_that_a_removed_node_has_changed(served, kind, loaded_again, server):
    """It stays so until it is loaded again, as in stock, or the change is taken back."""
    make = of(served)
    plain = server.sample(make(cp=CP))
    pids = server.worker_pids()
    try:
        stock = server.sample(make(**changed(kind)))
        assert_close(server.sample(make(cp=CP)), stock)
        assert_close(server.sample(make()), stock)
        assert differ(stock, plain)
        if loaded_again:
            server.free_first()
            assert_close(server.sample(make(cp=CP)), plain)
    finally:
        server.run(UNDO).check()
    assert_close(server.sample(make(cp=CP)), plain)
    assert loaded_again or server.worker_pids() == pids


@pytest.mark.parametrize("kind", ["call", "root"])
@pytest.mark.parametrize("served", ["flux"])
def test_a_refused_change_outlives_its_node(served, kind, server):
    """The refusal says what helps: without the node it is the same."""
    make, remedy = partial(of(served), cp=CP), "Remove that node, then have the model loaded again: Edit, Unload Models"
    plain = server.sample(make())
    try:
        for nodes in (changed(kind), {}):
            server.fails(make(**nodes), remedy)
        server.free_first()
        assert_close(server.sample(make()), plain)
    finally:
        server.run(UNDO).check()


@pytest.mark.parametrize(
    ("served", "weights"),
    [
        ("flux", "whole"),
        ("sd15", "sharded"),
        pytest.param("flux", "sharded", marks=pytest.mark.soak),
        pytest.param("sd15", "whole", marks=pytest.mark.soak),
    ],
)
def test_a_weight_between_two_prompts(served, weights, server):
    make = of(served)
    cp = {**CP, "weights": weights}
    plain = server.sample(make(cp=cp))
    stock = taken_back(server, make(**changed("weight")))
    assert_close(server.sample(make(cp=cp)), plain)
    assert_close(taken_back(server, make(cp=cp, **changed("weight"))), stock)
    assert differ(stock, plain)
    assert_close(server.sample(make(cp=cp)), plain)


@pytest.mark.parametrize("served", ["qwen"])
def test_a_weight_of_a_model_patch_after_its_first_use(served, server):
    """The ranks got it then."""
    patch = {
        "model_patch": node("TestModelPatch", kind="qwen", seed=3),
        "vae": node("TestVae", seed=2, video=True),
        "image": picture(80, 72),
    }
    case = NodeCase("QwenImageDiffsynthControlnet", {"strength": 3.0}, of(served), patch).at("model_nodes")

    def make(change=False):
        prompt = completed(case.build(cp=CP), server)
        if change:
            (user,) = (each for each in prompt.values() if each["class_type"] == "QwenImageDiffsynthControlnet")
            prompt["changed"] = {"class_type": "TestChangedPatch", "inputs": {"model_patch": ["model_patch", 0]}}
            user["inputs"]["model_patch"] = ["changed", 0]
        return prompt

    expected = server.sample(make())
    try:
        server.fails(make(change=True), "a node changed a model patch after its first use", "Load the model patch again")
    finally:
        server.run(UNDO).check()
    pids = server.worker_pids()
    assert_close(server.sample(make()), expected)
    assert server.worker_pids() == pids


@pytest.mark.parametrize("served", ["flux"])
def test_on_one_device_what_is_refused_counts(served, server):
    make = of(served)
    expected = taken_back(server, make(**changed("call")))
    out = taken_back(server, make(cp=SINGLE, **changed("call")))
    assert_close(out, expected)
    assert differ(out, server.sample(make(cp=CP)))
