"""Modules that a node changes in place, in ComfyUI's process only: refused by name, before or while sampling, and never computed
without the change. What is taken back runs again."""

import re
from functools import partial

import pytest
from support import families
from support.graphs import family_prompt, flux_prompt
from support.latents import assert_close, differ
from support.node_graphs import NodeCase, completed, node, picture
from support.vae_graphs import vae_prompt

pytestmark = pytest.mark.usefixtures("family_checkpoints", "vae_files")

CP = {"world_size": 2}
UNDO = {"undo": {"class_type": "TestUnchanged", "inputs": {}}}


def of(name):
    return partial(family_prompt, families.served()[name][1])


MODELS = {"flux": of("flux"), "wan_t2v": of("wan_t2v"), "sd15": of("sd15"), "ace_step": of("ace_step")}
BEFORE = {
    ("flux", "activation"): r"a node changed the class of double_blocks\.0\.\S+, now ReLU,",
    ("flux", "pruned"): r"a node changed its modules or their order of double_blocks,",
    ("wan_t2v", "eps"): "a node changed eps of ",
    ("flux", "call"): r"a node changed _call_impl of double_blocks\.0\.\S+,",
    ("flux", "parametrized"): r"a node changed the class of double_blocks\.0\.\S+, now Parametrized",
    ("ace_step", "buffer"): r"a node changed buffer \w+ of \S+,",
    ("sd15", "padding"): r"a node changed padding_mode of \S+,",
    ("sd15", "method"): r"a node changed _conv_forward of \S+,",
    ("flux", "hook_of_all"): "a node changed its hooks of all modules of the model,",
}
WHILE = {
    ("flux", "hook"): r"a node changed its hooks of double_blocks\.0,",
    ("wan_t2v", "forward"): r"a node changed forward of blocks\.0,",
    ("wan_t2v", "pruned"): r"a node changed its modules or their order of blocks,",
    ("sd15", "padding"): r"a node changed padding_mode of \S+,",
}
OF_A_VAE = {
    ("kl", "padding"): r"a node changed padding_mode of \S+,",
    ("kl", "method"): r"a node changed _conv_forward of \S+,",
    ("kl", "decode"): r"a node changed decode of the model,",
}


def ids(cases):
    return ["-".join(case) for case in cases]


def refused(server, words, prompt, right, expected):
    """A prompt ends with these words; what is taken back runs again, on the same ranks."""
    try:
        error = server.fails(prompt)
    finally:
        server.run(UNDO).check()
    assert re.search(words, error.exception_message), error.exception_message
    pids = server.worker_pids()
    assert_close(server.sample(right), expected)
    assert server.worker_pids() == pids


@pytest.mark.parametrize(("served", "kind"), BEFORE, ids=ids(BEFORE))
def test_before_sampling(served, kind, server):
    make = partial(MODELS[served], cp=CP)
    expected = server.sample(make())
    refused(server, BEFORE[served, kind], make(model_nodes=[("TestChangedModel", {"kind": kind})]), make(), expected)


@pytest.mark.parametrize(("served", "kind"), WHILE, ids=ids(WHILE))
def test_while_sampling(served, kind, server):
    """In the second step."""
    make = partial(MODELS[served], cp=CP, steps=3)
    expected = server.sample(make())
    refused(server, WHILE[served, kind], make(model_nodes=[("TestChangedWhileSampling", {"kind": kind})]), make(), expected)


@pytest.mark.parametrize("served", ["wan_t2v"])
def test_a_model_that_a_removed_node_has_changed(served, server):
    """It stays so until it is loaded again, as the text says."""
    make = partial(MODELS[served], cp=CP)
    expected = server.sample(make())
    try:
        server.fails(make(model_nodes=[("TestChangedModel", {"kind": "eps"})]))
        server.fails(make(), "a node changed eps of", "have the model loaded again: Edit, Unload Models and Execution Cache")
        server.free_first()
        assert_close(server.sample(make()), expected)
    finally:
        server.run(UNDO).check()


@pytest.mark.parametrize("served", ["flux", "sd15"])
def test_a_weight_between_two_prompts(served, server):
    """The ranks have it as it was."""
    make = partial(MODELS[served], cp=CP)
    expected = server.sample(make())
    words = r"code in ComfyUI's process changed the weight \S+ since the workers loaded"
    refused(server, words, make(model_nodes=[("TestChangedModel", {"kind": "weight"})]), make(), expected)


@pytest.mark.parametrize("served", ["qwen"])
def test_a_weight_of_a_model_patch_after_its_first_use(served, server):
    """The ranks got it then."""
    patch = {
        "model_patch": node("TestModelPatch", kind="qwen", seed=3),
        "vae": node("TestVae", seed=2, video=True),
        "image": picture(80, 72),
    }
    case = NodeCase("QwenImageDiffsynthControlnet", {"strength": 3.0}, of(served), patch).at("model_nodes")

    def make(changed=False):
        prompt = completed(case.build(cp=CP), server)
        if changed:
            (user,) = (each for each in prompt.values() if each["class_type"] == "QwenImageDiffsynthControlnet")
            prompt["changed"] = {"class_type": "TestChangedPatch", "inputs": {"model_patch": ["model_patch", 0]}}
            user["inputs"]["model_patch"] = ["changed", 0]
        return prompt

    expected = server.sample(make())
    refused(server, r"a node changed weight \S+ in a model patch after its first use", make(changed=True), make(), expected)


@pytest.mark.parametrize(("name", "kind"), OF_A_VAE, ids=ids(OF_A_VAE))
@pytest.mark.parametrize("mode", ["auto", "tiles"])
def test_of_a_vae(name, kind, mode, server):
    def make(**nodes):
        prompt = vae_prompt(name, "decode", mode, again=True)
        if nodes:
            prompt["changed"] = {"class_type": "TestChangedVAE", "inputs": {"vae": ["vae", 0], **nodes}}
            prompt["run"]["inputs"]["vae"] = ["changed", 0]
        return prompt

    expected = server.sample(vae_prompt(name, "decode", None if mode == "auto" else "tiled", again=True))
    refused(server, OF_A_VAE[name, kind], make(kind=kind), make(), expected)


def test_on_one_device_the_change_counts(server):
    """As in stock."""
    changed = [("TestChangedModel", {"kind": "eps"})]
    cp = {**CP, "on_unsupported": "single device"}
    try:
        expected = server.sample(flux_prompt(model_nodes=changed))
        server.run(UNDO).check()
        out = server.sample(flux_prompt(model_nodes=changed, cp=cp))
    finally:
        server.run(UNDO).check()
    assert_close(out, expected)
    assert differ(out, server.sample(flux_prompt(cp=CP)))
