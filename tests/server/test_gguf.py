"""Loaders of GGUF files, by a pack of the tests' own with the same classes and habits: its layers and patcher run on the ranks.

Tolerance: 1e-5 of the standard deviation of the stock latent: blocks become the same numbers everywhere (docs/numerics.md).
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
from support.faults import Faults
from support.gguf_files import write
from support.graphs import flux_prompt, renamed, wan_prompt
from support.latents import assert_close
from support.server import CUSTOM_NODES, GGUF_NODES, ComfyServer
from support.worlds import on_ranks

((PACK, SOURCE),) = GGUF_NODES.items()

assert_equal = partial(assert_close, bound=1e-5)
FILES = {"flux": "flux", "wan": "wan_t2v", "wan_low": "wan_t2v_low", "other": "flux_schnell"}
FILE_INPUTS = {"LoaderGGUF": "gguf_name", "LoaderGGUFAdvanced": "gguf_name"}
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
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def gguf_server(comfyui_path, models, pack, faults):
    nodes = {**CUSTOM_NODES, PACK: pack}
    with ComfyServer(comfyui_path, models=models.parent, custom_nodes=nodes, env=faults.environment) as server:
        yield server


def graph(family, file=None, by="UnetLoaderGGUF", loader=None, **settings):
    """A graph whose models come from files of blocks, by a node of that class and with more inputs of it."""
    prompt = BUILDS[family](**settings)
    for name, named in (("loader", file or f"{family}.gguf"), ("loader_low", f"{settings.get('low_ckpt')}.gguf")):
        if name in prompt:
            prompt[name] = {"class_type": by, "inputs": {FILE_INPUTS.get(by, "unet_name"): named, **(loader or {})}}
    return prompt


def stock(server, *args, **settings):
    """The latent of the graph without context parallelism."""
    return server.sample_once(graph(*args, **settings))


RUNS = [
    on_ranks(2, "flux", "sharded", LORAS["flux"]),
    on_ranks(3, "flux", "sharded", LORAS["flux"], soak=True),
    on_ranks(2, "flux", "offloaded", LORAS["flux"][:1]),
    on_ranks(2, "wan", "auto", LORAS["wan"]),
    on_ranks(2, "flux", "staged", LORAS["flux"]),
]


@pytest.mark.parametrize(("family", "weights", "loras", "world"), RUNS)
def test_latent_equals_the_stock_graph(family, weights, loras, world, gguf_server):
    cp = {"world_size": world, "weights": weights, "ulysses_degree": world if weights in ("whole", "offloaded") else 0}
    expected = stock(gguf_server, family, loras=loras)
    assert_equal(gguf_server.sample(graph(family, loras=loras, cp=cp), timeout=120), expected)
    assert len(gguf_server.worker_pids()) == world
    plain = stock(gguf_server, family)
    assert bool(loras) == bool((plain - expected).abs().max() > 1e-2 * plain.std())


@pytest.mark.parametrize("weights", ["whole", pytest.param("sharded", marks=pytest.mark.soak)])
def test_a_lora_that_changes(weights, gguf_server):
    """From one prompt to the next, behind Apply Context Parallel and gone again; the pages of the file stay as they are."""
    cp = {"world_size": 2, "weights": weights}
    for loras, behind in (([], False), ([("flux_lora", 0.5)], False), ([("flux_lora", 1.0)], True), ([], False)):
        expected = stock(gguf_server, "flux", loras=loras)
        assert_equal(gguf_server.sample(graph("flux", loras=loras, cp=cp, apply_after_lora=not behind), timeout=120), expected)
    gguf_server.free_workers()
    assert_equal(gguf_server.sample(graph("flux", cp=cp), timeout=120), stock(gguf_server, "flux"))


def test_the_loader_of_another_pack(gguf_server):
    out = gguf_server.sample(graph("flux", by="LoaderGGUF", loras=["flux_lora"], cp={"world_size": 2}), timeout=120)
    assert_equal(out, stock(gguf_server, "flux", loras=["flux_lora"]))


def test_two_files_that_take_turns(gguf_server):
    """As the models of Wan 2.2 for much and for little noise. The ranks hold both."""
    settings = {"node": "KSamplerAdvanced", "low_ckpt": "wan_low", "steps": 4, "cfg": 4.0, "loras": LORAS["wan"]}
    expected = stock(gguf_server, "wan", **settings)
    assert_equal(gguf_server.sample(graph("wan", cp={"world_size": 2}, **settings), timeout=120), expected)
    assert {"wan.gguf", "wan_low.gguf"} <= set(gguf_server.status()["models"])
    loads = gguf_server.log_text().count("[rank 1] loading")
    assert_equal(gguf_server.sample(graph("wan", cp={"world_size": 2}, **settings), timeout=120), expected)
    assert gguf_server.log_text().count("[rank 1] loading") == loads


def test_models_side_by_side(gguf_server):
    """Two strengths of a LoRA on the model of one file, and that of another file, in one prompt."""
    parts = {
        "half": {"loras": [("flux_lora", 0.5)]},
        "other": {"file": "other.gguf", "guidance": -1},
        "whole": {"loras": ["flux_lora"]},
    }
    prompt = {}
    for name, part in parts.items():
        prompt |= renamed(graph("flux", cp={"world_size": 2}, **part), f"{name} ")
    latents = gguf_server.latents(gguf_server.run(prompt, timeout=120))
    for name, part in parts.items():
        assert_equal(latents[f"{name} save"], stock(gguf_server, "flux", **part))


def loading(server, faults, seconds):
    """Queue a prompt whose model takes that long to load, and return its id once the ranks are at it."""
    server.free_workers()
    faults.arm(1, "slow", at="load", seconds=seconds)
    prompt_id = server.queue(graph("flux", loras=["flux_lora"], cp={"world_size": 2}))
    server.wait_status(lambda status: status["state"] == "loading", timeout=30.0)
    return prompt_id


def test_free_while_a_model_is_loaded(gguf_server, faults):
    """It waits for the prompt, as ComfyUI has it, and leaves nothing on the ranks."""
    expected = stock(gguf_server, "flux", loras=["flux_lora"])
    prompt_id = loading(gguf_server, faults, 1)
    gguf_server.free()
    assert_equal(gguf_server.latent(gguf_server.wait(prompt_id, 60)), expected)
    gguf_server.wait_status(lambda status: not status["models"], timeout=30.0)
    assert_equal(gguf_server.sample(graph("flux", loras=["flux_lora"], cp={"world_size": 2}), timeout=120), expected)


def test_cancel_while_a_model_is_loaded(gguf_server, faults):
    expected = stock(gguf_server, "flux", loras=["flux_lora"])
    prompt_id = loading(gguf_server, faults, 5)
    gguf_server.interrupt()
    assert gguf_server.wait(prompt_id, 30).status == "interrupted"
    assert_equal(gguf_server.sample(graph("flux", loras=["flux_lora"], cp={"world_size": 2}), timeout=120), expected)


def test_settings_of_a_loader_are_of_its_model(gguf_server):
    """It puts them on a class, where the next loader's are. Every rank has two models, and each has its own."""
    rough = {"dequant_dtype": "float16", "patch_dtype": "float16", "patch_on_device": False}
    fine = {"dequant_dtype": "float32", "patch_dtype": "target", "patch_on_device": True}
    node, cp = "UnetLoaderGGUFAdvanced", {"world_size": 2}
    expected = {}
    for name, loader in (("rough", rough), ("fine", fine)):
        gguf_server.free_first()  # the loader runs again
        expected[name] = gguf_server.sample(graph("flux", by=node, loader=loader, loras=["flux_lora"]))
        assert_equal(
            gguf_server.sample(graph("flux", by=node, loader=loader, loras=["flux_lora"], cp=cp), timeout=120), expected[name]
        )
    again = graph("flux", by=node, loader=rough, loras=["flux_lora"], cp=cp, seed=5)
    out = gguf_server.sample(again, timeout=120)
    gguf_server.free_first()
    assert_equal(out, gguf_server.sample(graph("flux", by=node, loader=rough, loras=["flux_lora"], seed=5)))
    assert (expected["rough"] - expected["fine"]).abs().max() > 1e-4 * expected["fine"].std()


def test_what_cannot_be_split_runs_on_one_device_as_the_pack_runs_it(gguf_server):
    nodes = {"after_apply": [("TestPatch", {"kind": "innermost_for_a_call"})], "loras": ["flux_lora"]}
    cp = {"world_size": 2, "on_unsupported": "single device"}
    assert_equal(gguf_server.sample(graph("flux", cp=cp, **nodes), timeout=120), gguf_server.sample(graph("flux", **nodes)))


@pytest.mark.parametrize(
    ("by", "inputs"),
    [
        ("OtherLoaderGGUF", {"unet_name": "flux.gguf"}),
        ("LoaderGGUF", {"model_name": "flux.gguf"}),
        ("LoaderGGUF", {"gguf_name": "flux.gguf", "plain_layers": True}),
        ("LoaderGGUFAdvanced", {"gguf_name": "flux.gguf"}),
    ],
)
def test_a_loader_that_nobody_knows(by, inputs, gguf_server):
    """A copy of another pack, and other versions: with other inputs, other layers, as ComfyUI's newer kind of node."""
    plain, ranked = (graph("flux", loras=["flux_lora"], cp=cp) for cp in (None, {"world_size": 2}))
    for prompt in (plain, ranked):
        prompt["loader"] = {"class_type": by, "inputs": inputs}
    assert_equal(gguf_server.sample(ranked, timeout=120), gguf_server.sample_once(plain))


def test_a_file_that_was_replaced(gguf_server, models):
    """ComfyUI keeps the old model until something asks for it anew, and workers that start then get that one."""
    file, cp = models / "replaced.gguf", {"world_size": 2}
    shutil.copy(models / "flux.gguf", file)
    expected = stock(gguf_server, "flux")
    assert_equal(gguf_server.sample(graph("flux", file.name, cp=cp), timeout=120), expected)
    shutil.copy(models / "other.gguf", models / "new.gguf")
    (models / "new.gguf").replace(file)
    gguf_server.post("/context_parallel/restart")
    assert_equal(gguf_server.sample(graph("flux", file.name, cp=cp), timeout=120), expected)
    gguf_server.free_first()
    new = partial(graph, "flux", file.name, guidance=-1)
    assert_equal(gguf_server.sample(new(cp=cp), timeout=120), gguf_server.sample(new()))


def test_a_file_that_was_replaced_before_the_ranks_had_its_model(gguf_server, models):
    """Its pages have no name any more."""
    file = models / "gone.gguf"
    shutil.copy(models / "flux.gguf", file)
    expected = gguf_server.sample(graph("flux", file.name))
    shutil.copy(models / "other.gguf", models / "new.gguf")
    (models / "new.gguf").replace(file)
    assert_equal(gguf_server.sample(graph("flux", file.name, cp={"world_size": 2}), timeout=120), expected)


def test_a_pack_that_changed_since_it_was_imported_is_refused(gguf_server, pack):
    code = pack / "ops.py"
    code.write_text(code.read_text().replace('"target"', '"TARGET"'))
    prompt = graph("flux", "other.gguf", guidance=-1, cp={"world_size": 2})
    gguf_server.post("/context_parallel/restart")
    gguf_server.fails(prompt, f"the node pack {PACK} replaced", "restart ComfyUI if files changed", timeout=120)
