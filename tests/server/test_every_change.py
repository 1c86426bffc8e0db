"""Every kind of change to a model or to the code that it computes with, by a node in ComfyUI's process: before the ranks load the
model, between two prompts, in a call. The prompt equals stock with that change, or is refused and says what was changed; what is
taken back runs again on the same ranks."""

import re
from functools import partial

import pytest
from support import families
from support.graphs import family_prompt
from support.latents import distance
from support.vae_graphs import vae_prompt

pytestmark = pytest.mark.usefixtures("family_checkpoints", "vae_files")

CP = {"world_size": 2}
UNDO = {"undo": {"class_type": "TestUnchanged", "inputs": {}}}
SERVED = ("flux", "wan_t2v", "ace_step")
MODULES = (
    "activation", "pruned", "eps", "call", "parametrized", "buffer", "buffer_dtype", "weight", "row", "element", "weight_replaced",
    "weight_dtype", "bias_none", "plain_tensor", "field", "in_a_list", "class", "training", "reordered", "hook", "hook_of_all",
    "forward",
)  # fmt: skip
CODE = (
    "block", "layer norm", "linear", "silu", "gelu", "object", "defaults", "tensor", "einops", "property", "constant", "patches",
)  # fmt: skip
LACKS = {("flux", "buffer"), ("flux", "buffer_dtype"), ("wan_t2v", "buffer"), ("wan_t2v", "buffer_dtype"), ("wan_t2v", "field")}
"""What a model does not have."""
WHEN = ("before load", "between prompts", "in a call")
WORDS = re.compile("replaced|put a hook|into training mode")


def is_often(place, turn, served):
    """Whether `make test` has the change of this place in the lists, at this moment, with this model: each once, by turns."""
    having = [each for each in SERVED if (each, (*MODULES, *CODE)[place]) not in LACKS]
    return turn == place // 3 % len(WHEN) and served == having[place % len(having)]


CASES = [
    pytest.param(served, kind, when, marks=() if is_often(place, turn, served) else pytest.mark.soak)
    for place, kind in enumerate((*MODULES, *CODE))
    for turn, when in enumerate(WHEN)
    for served in SERVED
    if (served, kind) not in LACKS
]
OF_VAES = (
    "padding", "method", "decode", "training", "weight_dtype", "weight_replaced", "bias_none", "plain_tensor", "row", "element",
    "class", "hook", "call",
)  # fmt: skip
VAE_CASES = [
    pytest.param(kind, when, mode, marks=() if place % 4 == 2 * turn + number else pytest.mark.soak)
    for place, kind in enumerate(OF_VAES)
    for turn, when in enumerate(WHEN[:2])
    for number, mode in enumerate(("auto", "tiles"))
]


def outcome(server, prompt):
    """The latent, or what the error says."""
    result = server.run(prompt)
    return result.error.exception_message if result.error else server.latent(result)


@pytest.mark.parametrize(("served", "kind", "when"), CASES)
def test_a_changed_model(served, kind, when, server):
    make = partial(family_prompt, families.served()[served][1], steps=3)
    name = "TestChangedWhileSampling" if when == WHEN[2] else "TestChangedModel"
    changed = {"model_nodes": [(name, {"kind": kind})]}
    try:
        stock = outcome(server, make(**changed))
        server.run(UNDO).check()
        expected = (server.sample if when == WHEN[1] else server.sample_once)(make(cp=CP))
        if when == "before load":
            server.free_first()
        found = outcome(server, make(cp=CP, **changed))
    finally:
        server.run(UNDO).check()
    if isinstance(found, str):
        assert WORDS.search(found) or isinstance(stock, str), found
    else:
        assert not isinstance(stock, str), f"stock said {stock}"
        assert distance(found, stock) < 2e-4
    pids = server.worker_pids()
    assert distance(server.sample(make(cp=CP)), expected) < 2e-4
    assert server.worker_pids() == pids


@pytest.mark.parametrize("served", ["flux"])
@pytest.mark.parametrize("when", WHEN[:2])
def test_changed_code_of_weight_patches(served, when, server):
    """It computes on the ranks, and only for models that have some."""
    make = partial(family_prompt, families.served()[served][1], cp=CP, loras=["flux_lora"])
    expected, plain = server.sample(make()), server.sample(make(loras=[]))
    if when == "before load":
        server.free_first()
    changed = {"model_nodes": [("TestChangedModel", {"kind": "patches"})]}
    try:
        server.fails(make(**changed), "replaced comfy.lora.calculate_weight")
        assert distance(server.sample(make(loras=[])), plain) < 2e-4
    finally:
        server.run(UNDO).check()
    assert distance(server.sample(make()), expected) < 2e-4


@pytest.mark.parametrize("served", ["flux"])
@pytest.mark.parametrize("when", WHEN[:2])
def test_a_wrapped_network(served, when, server):
    """It acts in ComfyUI's process, also where this pack puts something of its own there."""
    make = partial(family_prompt, families.served()[served][1])
    changed = {"model_nodes": [("TestChangedApply", {})]}
    try:
        stock = server.sample(make(**changed))
        server.run(UNDO).check()
        expected = server.sample(make(cp=CP))
        if when == "before load":
            server.free_first()
        assert distance(server.sample(make(cp=CP, **changed)), stock) < 2e-4
    finally:
        server.run(UNDO).check()
    assert distance(server.sample(make(cp=CP)), expected) < 2e-4
    assert distance(stock, expected) > 1e-2


@pytest.mark.parametrize(("kind", "when", "mode"), VAE_CASES)
def test_a_changed_vae(kind, when, mode, server):
    def make(changed, mode=mode):
        prompt = vae_prompt("kl", "decode", mode, again=True)
        if changed:
            prompt["changed"] = {"class_type": "TestChangedVAE", "inputs": {"vae": ["vae", 0], "kind": kind}}
            prompt["run"]["inputs"]["vae"] = ["changed", 0]
        return prompt

    stock_mode = None if mode == "auto" else "tiled"
    try:
        stock = outcome(server, make(True, stock_mode))
        server.run(UNDO).check()
        expected = (server.sample if when == WHEN[1] else server.sample_once)(make(False))
        if when == "before load":
            server.free_first()
        found = outcome(server, make(True))
    finally:
        server.run(UNDO).check()
    if isinstance(found, str):
        assert WORDS.search(found), found
    else:
        assert distance(found, stock) < 2e-4
    assert distance(server.sample(make(False)), expected) < 2e-4
