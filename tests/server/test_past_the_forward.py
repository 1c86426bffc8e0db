"""Code of nodes that runs modules of a model on the ranks past the forward that goes there: refused by name, or on one device with
the stock latent. Such modules would compute in ComfyUI's process, with weights as in the file, without LoRA."""

from functools import partial

import pytest
from support import families
from support.graphs import family_prompt
from support.latents import assert_close, differ

pytestmark = pytest.mark.usefixtures("family_checkpoints")

CP = {"world_size": 2}
SERVED = ("flux", "wan_t2v", "qwen", "sd3", "sdxl")
KINDS = {
    "innermost_for_a_call": "(forward) computes with ",
    "forward_of_the_class": "(forward) computes with ",
    "layer_alone": "(wrapper) computes with ",
}


CASES = [
    pytest.param(served, kind, place, marks=() if (one + other + turn) % 2 else pytest.mark.soak)
    for one, served in enumerate(SERVED)
    for other, kind in enumerate(KINDS)
    for turn, place in enumerate(("model_nodes", "after_apply"))
]
"""Every kind with every model, by turns in one place; the soak has both."""


@pytest.mark.parametrize(("served", "kind", "place"), CASES)
def test_modules_never_compute_here(kind, served, place, server):
    make = partial(family_prompt, families.served()[served][1], steps=2)
    patched = {place: [("TestPatch", {"kind": kind})]}
    right = server.sample(make(cp=CP))
    server.fails(make(cp=CP, **patched), f"the node pack context-parallel-test-nodes {KINDS[kind]}", "if a call cannot be split")
    pids = server.worker_pids()
    assert_close(server.sample(make(cp=CP)), right)
    assert server.worker_pids() == pids
    expected = server.sample_once(make(**patched))
    assert differ(expected, right)
    assert_close(server.sample(make(cp={**CP, "on_unsupported": "single device"}, **patched)), expected)
