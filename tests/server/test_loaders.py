"""Models of any loader: the ranks get the network as it is in ComfyUI's process, wherever that has it from."""

import pytest
from support.graphs import flux_prompt
from support.latents import assert_close, differ

CP = {"world_size": 2}


def by(loader, inputs, **settings):
    prompt = flux_prompt(**settings)
    prompt["loader"] = {"class_type": loader, "inputs": inputs}
    return prompt


LOADERS = {
    "in memory": ("TestModel", {"seed": 4}, "sharded"),
    "with a callback": ("TestLoader", {"kind": "callback"}, "sharded"),
    "with a callback, fp8": ("TestLoader", {"kind": "callback", "weight_dtype": "fp8_e4m3fn"}, "whole"),
    "without a recipe": ("TestLoader", {"kind": "without a recipe"}, "whole"),
}


@pytest.mark.parametrize("loras", [[], [("flux_lora", 0.7)]], ids=["plain", "lora"])
@pytest.mark.parametrize("name", LOADERS)
def test_the_latent_equals_the_stock_graph(name, loras, server):
    loader, inputs, weights = LOADERS[name]
    expected = server.sample_once(by(loader, inputs, loras=loras))
    assert_close(server.sample(by(loader, inputs, loras=loras, cp={**CP, "weights": weights})), expected)
    assert differ(expected, server.sample_once(flux_prompt(loras=loras)))


def test_two_models_of_one_node(server):
    """They have no file that would tell them apart."""
    for seed in (4, 5, 4):
        expected = server.sample_once(by("TestModel", {"seed": seed}))
        assert_close(server.sample(by("TestModel", {"seed": seed}, cp=CP)), expected)


def test_a_patcher_of_another_class(server):
    """Of a node pack: as loaders of packs have."""
    patched = {"model_nodes": [("TestPatch", {"kind": "subclass"})]}
    assert_close(server.sample(flux_prompt(cp=CP, **patched)), server.sample_once(flux_prompt(**patched)))
