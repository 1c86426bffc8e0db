"""Node packs that replace code of ComfyUI or torch when they are imported: ranks import them too, and give stock's picture. What a
pack replaces later is refused by its name."""

from functools import partial

import pytest
from support import families
from support.graphs import family_prompt
from support.latents import assert_close, differ
from support.package import ROOT
from support.server import CUSTOM_NODES, ComfyServer

pytestmark = pytest.mark.usefixtures("family_checkpoints")

PACKS = ROOT / "tests" / "support" / "packs"
NAMES = ("backport", "block", "constant", "late", "norm")
CP = {"world_size": 2}
IMPORTED = "imported the node pack "
# What each of them changes, and by whom.
SERVED = {"flux": ("norm", "block"), "wan_t2v": ("norm", "backport"), "sdxl": ("norm", "constant"), "ace_step": ("norm",)}


@pytest.fixture(scope="module")
def pack_server(comfyui_path, checkpoints_dir):
    nodes = CUSTOM_NODES | {f"changing-{name}": PACKS / name for name in NAMES}
    with ComfyServer(comfyui_path, models=checkpoints_dir, custom_nodes=nodes) as running:
        yield running


def prompt_of(served, **settings):
    return family_prompt(families.served()[served][1], steps=2, **settings)


@pytest.mark.parametrize(("served", "lora"), [*((each, False) for each in SERVED), ("flux", True)])
def test_the_picture_of_stock(served, lora, pack_server, server):
    make = partial(prompt_of, served, **({"loras": ["flux_lora"]} if lora else {}))
    expected = pack_server.sample(make())
    assert differ(expected, server.sample(make()))
    assert_close(pack_server.sample(make(cp=CP)), expected)
    for name in SERVED[served]:
        assert f"{IMPORTED}changing-{name}" in pack_server.log_text()


def test_ranks_import_no_more_than_they_need(pack_server):
    pack_server.run(prompt_of("flux", cp=CP)).check()
    assert f"{IMPORTED}changing-late" not in pack_server.log_text()


@pytest.mark.parametrize("served", ["flux"])
def test_a_prompt_that_changes_nothing_imports_nothing(served, server):
    server.post("/context_parallel/restart")
    before = len(server.log_text())
    server.run(prompt_of("flux", cp=CP)).check()
    assert IMPORTED not in server.log_text()[before:]


@pytest.mark.parametrize("served", ["flux"])
@pytest.mark.parametrize(
    ("change", "back", "what"),
    [
        (("ReplaceLater", {"back": False}), ("ReplaceLater", {"back": True}), "changing-late replaced comfy.ldm.flux.layers.rope"),
        (
            ("SetScale", {"scale": 0.8}),
            ("SetScale", {"scale": 0.9}),
            "changing-block replaced custom_nodes/changing-block.SETTINGS['flux']['scale']",
        ),
    ],
    ids=["code", "settings"],
)
def test_what_a_pack_changes_later_is_refused(change, back, what, served, pack_server):
    """Between two prompts with the same model."""
    make = partial(prompt_of, served, cp=CP)
    expected = pack_server.sample(make())
    try:
        pack_server.fails(make(model_nodes=[change]), what, "it does not do so when the workers import it", "Disable that pack")
        stock = pack_server.sample(prompt_of(served))
        assert differ(stock, expected)
        one_device = {**CP, "on_unsupported": "single device"}
        assert_close(pack_server.sample(family_prompt(families.served()[served][1], steps=2, cp=one_device)), stock)
    finally:
        pack_server.run(prompt_of(served, model_nodes=[back])).check()
    assert_close(pack_server.sample(make()), expected)
