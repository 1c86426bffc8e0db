"""Loaders of GGUF files, by a pack of the tests' own with the same classes and habits: the ranks repeat the call of the node.

Tolerance: 1e-5 of the standard deviation of the stock latent: blocks become the same numbers everywhere (docs/numerics.md).
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from support.graphs import flux_prompt, wan_prompt
from support.server import CUSTOM_NODES, ComfyServer
from support.worlds import on_ranks

SOURCE = Path(__file__).parents[1] / "support" / "gguf_pack"
sys.path.append(str(SOURCE))
from blocks import write  # noqa: E402  (the rest of the pack needs ComfyUI)

PACK = "ComfyUI-GGUF"
TOLERANCE = 1e-5
FILES = {"flux": "flux", "wan": "wan_t2v", "other": "flux_schnell"}
BUILDS = {"flux": flux_prompt, "wan": wan_prompt}
LORAS = {"flux": [("flux_lora", 0.7), ("flux_lora_kohya", -0.4)], "wan": [("wan_t2v_lora", 0.5)]}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A copy, as a test changes it."""
    return Path(shutil.copytree(SOURCE, tmp_path_factory.mktemp("packs") / PACK))


@pytest.fixture(scope="module")
def models(checkpoints_dir, tmp_path_factory):
    """The folder of the files of blocks, beside the LoRAs of all tests."""
    folder = tmp_path_factory.mktemp("models") / "diffusion_models"
    folder.mkdir()
    (folder.parent / "loras").symlink_to(checkpoints_dir / "loras")
    for name, source in FILES.items():
        write(checkpoints_dir / "diffusion_models" / f"{source}.safetensors", folder / f"{name}.gguf")
    return folder


@pytest.fixture(scope="module")
def gguf_server(comfyui_path, models, pack):
    with ComfyServer(comfyui_path, models=models.parent, custom_nodes={**CUSTOM_NODES, PACK: pack}) as server:
        yield server


def graph(family, file=None, node="UnetLoaderGGUF", loader=None, **settings):
    """A graph whose model comes from a file of blocks."""
    prompt = BUILDS[family](**settings)
    prompt["loader"] = {"class_type": node, "inputs": {"unet_name": file or f"{family}.gguf", **(loader or {})}}
    return prompt


def assert_equal(out, expected):
    assert expected.std() > 1e-2
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


RUNS = [
    on_ranks(2, "flux", "whole", []),
    on_ranks(3, "flux", "sharded", LORAS["flux"]),
    on_ranks(2, "flux", "offloaded", LORAS["flux"][:1]),
    on_ranks(2, "wan", "auto", LORAS["wan"]),
    on_ranks(3, "wan", "sharded", []),
]


@pytest.mark.parametrize(("family", "weights", "loras", "world"), RUNS)
def test_latent_equals_the_stock_graph(family, weights, loras, world, gguf_server):
    cp = {"world_size": world, "weights": weights, "ulysses_degree": world if family == "flux" and world == 2 else 0}
    expected = gguf_server.sample_once(graph(family, loras=loras))
    assert_equal(gguf_server.sample(graph(family, loras=loras, cp=cp), timeout=120), expected)
    assert len(gguf_server.worker_pids()) == world
    plain = gguf_server.sample_once(graph(family))
    assert bool(loras) == bool((plain - expected).abs().max() > 1e-2 * plain.std())


@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_a_lora_that_changes(weights, gguf_server):
    """From one prompt to the next, behind Apply Context Parallel and gone again; the pages of the file stay as they are."""
    cp = {"world_size": 2, "weights": weights}
    for loras, behind in (([], False), ([("flux_lora", 0.5)], False), ([("flux_lora", 1.0)], True), ([], False)):
        expected = gguf_server.sample_once(graph("flux", loras=loras))
        assert_equal(gguf_server.sample(graph("flux", loras=loras, cp=cp, apply_after_lora=not behind), timeout=120), expected)
    gguf_server.free_workers()
    assert_equal(gguf_server.sample(graph("flux", cp=cp), timeout=120), gguf_server.sample_once(graph("flux")))


def test_settings_of_a_loader_are_of_its_model(gguf_server):
    """It puts them on a class, where the next loader's are. Every rank has two models, and each has its own."""
    rough = {"dequant_dtype": "float16", "patch_dtype": "float16", "patch_on_device": False}
    fine = {"dequant_dtype": "float32", "patch_dtype": "target", "patch_on_device": True}
    node, cp = "UnetLoaderGGUFAdvanced", {"world_size": 2}
    expected = {}
    for name, loader in (("rough", rough), ("fine", fine)):
        gguf_server.free_first()  # the loader runs again
        expected[name] = gguf_server.sample(graph("flux", node=node, loader=loader, loras=["flux_lora"]))
        assert_equal(
            gguf_server.sample(graph("flux", node=node, loader=loader, loras=["flux_lora"], cp=cp), timeout=120), expected[name]
        )
    again = graph("flux", node=node, loader=rough, loras=["flux_lora"], cp=cp, seed=5)
    out = gguf_server.sample(again, timeout=120)
    gguf_server.free_first()
    assert_equal(out, gguf_server.sample(graph("flux", node=node, loader=rough, loras=["flux_lora"], seed=5)))
    assert (expected["rough"] - expected["fine"]).abs().max() > 1e-4 * expected["fine"].std()


def test_what_cannot_be_split_runs_on_one_device_as_the_pack_runs_it(gguf_server):
    nodes = {"after_apply": [("TestPatch", {"kind": "for_a_call"})], "loras": ["flux_lora"]}
    cp = {"world_size": 2, "on_unsupported": "single device"}
    assert_equal(gguf_server.sample(graph("flux", cp=cp, **nodes), timeout=120), gguf_server.sample(graph("flux", **nodes)))


def test_a_second_apply_context_parallel_changes_nothing(gguf_server):
    again = ("ApplyContextParallel", {"cp_config": ["cp_config", 0]})
    out = gguf_server.sample(graph("flux", loras=["flux_lora"], cp={"world_size": 2}, after_apply=[again]), timeout=120)
    assert_equal(out, gguf_server.sample_once(graph("flux", loras=["flux_lora"])))


def test_a_copy_of_the_loader_that_nobody_knows_is_refused(gguf_server):
    result = gguf_server.run(graph("flux", node="OtherLoaderGGUF", cp={"world_size": 2}), timeout=60)
    for words in ("left no recipe", "Unet Loader (GGUF)", "Load Diffusion Model"):
        assert words in result.error.exception_message


def test_a_file_that_was_replaced_is_loaded_again(gguf_server, models):
    """ComfyUI keeps the old model until something asks for it anew: the ranks must not take the new file for it."""
    file, cp = models / "replaced.gguf", {"world_size": 2}
    shutil.copy(models / "flux.gguf", file)
    expected = gguf_server.sample_once(graph("flux"))
    assert_equal(gguf_server.sample(graph("flux", file.name, cp=cp), timeout=120), expected)
    shutil.copy(models / "other.gguf", models / "new.gguf")
    (models / "new.gguf").replace(file)
    gguf_server.post("/context_parallel/restart")
    result = gguf_server.run(graph("flux", file.name, cp=cp, seed=2), timeout=120)
    assert "changed on disk after ComfyUI had loaded it" in result.error.exception_message
    gguf_server.free_first()
    new = partial(graph, "flux", file.name, guidance=-1)
    assert_equal(gguf_server.sample(new(cp=cp), timeout=120), gguf_server.sample(new()))


def test_a_pack_that_changed_since_it_was_imported_is_refused(gguf_server, pack):
    code = pack / "ops.py"
    code.write_text(code.read_text().replace('"target"', '"TARGET"'))
    result = gguf_server.run(graph("flux", "other.gguf", guidance=-1, cp={"world_size": 2}), timeout=60)
    assert f"{PACK}/ops.py changed on disk after ComfyUI had imported it. Restart ComfyUI." in result.error.exception_message
