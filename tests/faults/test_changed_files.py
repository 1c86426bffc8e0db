"""Case 42: a model file that changes while ComfyUI runs never gives another picture, and never ends ComfyUI."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.graphs import MODEL, flux_prompt
from support.latents import assert_close
from support.server import CUSTOM_NODES, ComfyServer

CP = {"world_size": 2}
FACTORY_PACK = Path(__file__).parents[1] / "support" / "factory_pack"
FP8 = {"weight_dtype": "fp8_e4m3fn"}
CHANGED = "flux.safetensors changed on disk after ComfyUI had loaded it"


@pytest.fixture(scope="module")
def models(checkpoints_dir, tmp_path_factory):
    """A folder with a model file, and others beside it to replace it with."""
    base = tmp_path_factory.mktemp("changing")
    (base / "diffusion_models").mkdir()
    (base / "loras").mkdir()
    shutil.copy(checkpoints_dir / "loras" / "flux_lora.safetensors", base / "loras")
    source = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    shutil.copy(source, base / "original")
    with safe_open(source, "pt") as opened:
        tensors = {key: opened.get_tensor(key).flip(0).contiguous() for key in opened.keys()}  # noqa: SIM118
        save_file(tensors, base / "other", metadata=opened.metadata())
        save_file(tensors, base / "longer", metadata={**(opened.metadata() or {}), "more": "x" * 5000})
    assert (base / "other").stat().st_size == (base / "original").stat().st_size
    shutil.copy(base / "original", model_file(base))
    return base


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A node pack that tests may change."""
    return shutil.copytree(FACTORY_PACK, tmp_path_factory.mktemp("packs") / "factory")


@pytest.fixture(scope="module")
def file_server(comfyui_path, models, pack):
    # What ComfyUI holds is not to depend on how much memory other programs have left.
    nodes = {**CUSTOM_NODES, "test-factory.pack": pack}
    with ComfyServer(comfyui_path, models=models, custom_nodes=nodes, args=["--cache-classic"]) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(models, file_server):
    """The original file, and nothing loaded."""
    replace(models, "original")
    file_server.free_first()


def model_file(base: Path) -> Path:
    return base / "diffusion_models" / "flux.safetensors"


def replace(base: Path, source: str) -> None:
    """Put another file in the place of the model file, as programs do that write it completely before."""
    shutil.copy(base / source, base / "new")
    os.replace(base / "new", model_file(base))


def latent(server: ComfyServer, **settings: object) -> torch.Tensor:
    return server.sample(flux_prompt(**settings), timeout=120)


def error(server: ComfyServer, **settings: object) -> str:
    return server.fails(flux_prompt(**settings), timeout=120).exception_message


def by_rename(base: Path) -> None:
    replace(base, "other")


def by_rename_with_the_same_time(base: Path) -> None:
    before = model_file(base).stat()
    replace(base, "other")
    os.utime(model_file(base), ns=(before.st_atime_ns, before.st_mtime_ns))


def in_place_with_the_same_time(base: Path) -> None:
    before = model_file(base).stat()
    model_file(base).write_bytes((base / "other").read_bytes())
    os.utime(model_file(base), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model_file(base).stat().st_ino == before.st_ino


@pytest.mark.bits("the stock path twice")
@pytest.mark.parametrize(
    ("change", "weights"),
    [(by_rename, {}), (by_rename_with_the_same_time, {}), (in_place_with_the_same_time, {}), (in_place_with_the_same_time, FP8)],
)
def test_a_file_that_is_replaced_before_the_ranks_load_it(file_server, models, change, weights):
    """ComfyUI holds the old model, from a prompt without context parallelism. The ranks must not take the new one for it."""
    old = latent(file_server, **weights)
    change(models)
    said = error(file_server, cp=CP, **weights)
    assert CHANGED in said
    assert "node changed" not in said
    new = latent(file_server, **weights)
    assert (new - old).abs().max() > 0.5 * old.std()  # or nothing would be proved
    assert_close(latent(file_server, cp=CP, **weights), new)


def test_weights_are_compared_where_nobody_saw_the_file_being_loaded(file_server, models):
    """A pack may have imported ComfyUI's loader before this one came."""
    latent(file_server, **FP8)
    replace(models, "other")
    said = error(file_server, cp=CP, model_nodes=[("TestPatch", {"kind": "unstamped"})], **FP8)
    assert "read another weight" in said
    assert "the file was replaced" in said


def test_a_weight_that_a_node_changed_in_place_with_a_weight_dtype(file_server):
    """The file's pages are not the weights there, so the UI's copy is compared with the ranks' by samples."""
    changed = {"model_nodes": [("TestPatch", {"kind": "changed_weight"})], "weight_dtype": "fp8_e5m2"}
    latent(file_server, **changed)
    assert "read another weight img_in.bias" in error(file_server, cp=CP, **changed)


@pytest.mark.bits("the stock path twice")
@pytest.mark.parametrize("placement", ["whole", "sharded"])
def test_a_file_that_is_cut_off_does_not_end_comfyui(file_server, models, placement):
    """ComfyUI's own weights are the file's pages once the ranks have them."""
    cp = {**CP, "weights": placement}
    stock = latent(file_server)
    latent(file_server, cp=cp)
    size = model_file(models).stat().st_size
    os.truncate(model_file(models), size // 2)
    said = error(file_server, cp=cp) if placement == "whole" else error(file_server)
    assert CHANGED in said
    assert f"it has {size // 2} bytes" in said
    assert f"it had {size} bytes" in said
    replace(models, "original")
    assert (latent(file_server) == stock).all()
    assert_close(latent(file_server, cp=cp), stock)


def in_place(base: Path, source: str = "other") -> None:
    """Write into the file, which never is shorter than what is mapped."""
    with open(model_file(base), "r+b") as file:
        file.write((base / source).read_bytes())


OVERWRITTEN = {
    "same size": in_place,
    "another size": lambda base: in_place(base, "longer"),
    "its time put back": in_place_with_the_same_time,
}
PLACEMENTS = ["whole", "sharded", "offloaded", "staged"]


@pytest.fixture(scope="module")
def pictures(models, file_server):
    """The latents of the original and of the other file, as ComfyUI alone computes them."""
    made = []
    for name in ("other", "original"):
        replace(models, name)
        file_server.free_first()
        made.insert(0, latent(file_server))
    assert (made[0] - made[1]).abs().max() > 0.5 * made[0].std()
    return made


def every(*changes: str) -> list:
    """Every placement with one of the changes; the soak has all."""
    return [
        pytest.param(placement, change, marks=() if change == changes[number % len(changes)] else pytest.mark.soak)
        for number, placement in enumerate(PLACEMENTS)
        for change in changes
    ]


@pytest.mark.parametrize(("placement", "change"), every("its time put back", "same size", "another size"))
def test_a_file_that_is_overwritten_while_ranks_use_it(file_server, models, pictures, placement, change):
    """In place, between two prompts: an error with its name, and then the new content everywhere."""
    cp = {**CP, "weights": placement}
    assert_close(latent(file_server, cp=cp), pictures[0])
    OVERWRITTEN[change](models)
    assert CHANGED in error(file_server, cp=cp)
    assert_close(latent(file_server, cp=cp), pictures[1])
    assert_close(latent(file_server), pictures[1])


@pytest.mark.bits("the stock path twice")
@pytest.mark.parametrize("first", [None, CP], ids=["stock", "ranks"])
def test_comfyui_alone_uses_no_mixture_either(file_server, models, pictures, first):
    """What it has to itself stays as it is; what it shares with the ranks is pages of the file."""
    latent(file_server, cp=first)
    in_place(models)
    if first is None:
        assert (latent(file_server) == pictures[0]).all()
    else:
        assert CHANGED in error(file_server)
        assert (latent(file_server) == pictures[1]).all()


@pytest.mark.parametrize("cp", [None, CP], ids=["stock", "ranks"])
def test_a_file_that_is_overwritten_before_its_model_is_merged(file_server, models, pictures, cp):
    """What ComfyUI's process holds of it is pages of the file since ranks have had it."""
    shutil.copy(models / "original", model_file(models).with_name("second.safetensors"))
    other = {"other": ("UNETLoader", {"unet_name": "flux.safetensors", "weight_dtype": "default"})}
    merge = ("ModelMergeSimple", {"model1": MODEL, "model2": ["other", 0], "ratio": 0.3})
    graph = {"ckpt": "second", "others": other, "model_nodes": [merge], "cp": cp}
    latent(file_server, cp=CP)
    in_place(models)
    assert CHANGED in error(file_server, **graph)
    file_server.free_first()
    merged = latent(file_server, **graph)
    assert (merged - pictures[0]).abs().max() > 0.1 * merged.std()


def test_a_file_that_is_overwritten_after_its_model_was_merged(file_server, models, pictures):
    """ComfyUI keeps the merge, and has it loaded again for a LoRA."""
    shutil.copy(models / "original", model_file(models).with_name("second.safetensors"))
    other = {"other": ("UNETLoader", {"unet_name": "flux.safetensors", "weight_dtype": "default"})}
    merge = ("ModelMergeSimple", {"model1": MODEL, "model2": ["other", 0], "ratio": 0.3})
    graph = {"ckpt": "second", "others": other, "model_nodes": [merge], "cp": CP}
    latent(file_server, cp=CP)
    latent(file_server, **graph)
    in_place(models)
    lora = ("LoraLoaderModelOnly", {"lora_name": "flux_lora.safetensors", "strength_model": 0.7})
    assert CHANGED in error(file_server, **{**graph, "model_nodes": [merge, lora]})


LONG = {"steps": 900, "width": 128, "height": 128}


@pytest.mark.parametrize(("placement", "change"), every("same size", "its time put back"))
def test_a_file_that_is_overwritten_between_two_calls_of_a_prompt(file_server, models, pictures, placement, change):
    cp = {**CP, "weights": placement}
    running = file_server.queue(flux_prompt(cp=cp, **LONG))
    file_server.wait_for_step(running)
    OVERWRITTEN[change](models)
    failed = file_server.wait(running, timeout=60)
    assert failed.error is not None
    assert CHANGED in failed.error.exception_message
    assert_close(latent(file_server, cp=cp), pictures[1])


def test_a_file_that_is_copied_over_in_the_middle_of_a_call(file_server, models, pictures):
    """It is empty for a moment, which may end ranks that read it. The error names the file all the same."""
    running = file_server.queue(flux_prompt(cp=CP, **LONG))
    file_server.wait_for_step(running)
    shutil.copyfile(models / "other", model_file(models))
    failed = file_server.wait(running, timeout=60)
    assert failed.error is not None
    assert CHANGED in failed.error.exception_message
    assert_close(latent(file_server, cp=CP), pictures[1])


@pytest.mark.parametrize(
    "placement", [pytest.param(each, marks=() if each in ("whole", "sharded") else pytest.mark.soak) for each in PLACEMENTS]
)
def test_ranks_keep_a_file_that_another_one_replaces(file_server, models, placement):
    """To the end, also when they read it again for a LoRA."""
    cp, loras = {**CP, "weights": placement}, [("flux_lora", 0.7)]
    expected, patched = latent(file_server), latent(file_server, loras=loras)
    assert_close(latent(file_server, cp=cp), expected)
    by_rename(models)
    assert_close(latent(file_server, cp=cp, loras=loras), patched)
    assert_close(latent(file_server, cp=cp), expected)


@pytest.mark.bits("the same call twice")
def test_ranks_keep_a_lora_whose_file_is_overwritten(file_server, models):
    cp = {"cp": CP, "loras": [("flux_lora", 0.7)]}
    before = latent(file_server, **cp)
    with open(models / "loras" / "flux_lora.safetensors", "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    assert (latent(file_server, **cp) == before).all()


def by_factory(kind: str = "plain", weight_dtype: str = "default", cp: dict | None = None) -> dict:
    """A graph whose model comes from a loader of another pack."""
    prompt = flux_prompt(cp=cp)
    inputs = {"unet_name": "flux.safetensors", "kind": kind, "weight_dtype": weight_dtype}
    prompt["loader"] = {"class_type": "TestFactoryLoader", "inputs": inputs}
    return prompt


@pytest.mark.parametrize(
    ("kind", "weight_dtype", "weights"),
    [("plain", "default", "sharded"), ("in a list", "fp8_e4m3fn", "whole"), ("in init", "default", "whole")],
)
def test_a_loader_of_another_pack(file_server, kind, weight_dtype, weights):
    """The ranks call the pack's own function, which changes a weight. The pack itself takes a server to import."""
    expected = file_server.sample(by_factory(kind, weight_dtype))
    assert_close(file_server.sample(by_factory(kind, weight_dtype, {**CP, "weights": weights}), timeout=120), expected)
    assert (latent(file_server, weight_dtype=weight_dtype) - expected).abs().max() > 0.05 * expected.std()


LOADERS = {
    "by name": "its arguments name no model file by its whole path",
    "of an object": "is a builtins.object, which cannot be sent",
    "a method": "it does not stand at the top of a module",
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_of_other_packs_that_cannot_be_repeated(file_server, kind):
    file_server.fails(by_factory(kind, cp=CP), LOADERS[kind], "Use Load Diffusion Model or Load Checkpoint")


@pytest.mark.parametrize("file", ["loaders.py", "scale.py"])
def test_a_loader_of_another_pack_that_changed_on_disk(file_server, pack, file):
    """Its own file, and one that it imports: ComfyUI has the old code, and workers that start now would get the new one."""
    before = (pack / file).read_text()
    try:
        (pack / file).write_text(before.replace("weight", "wait"))
        words = "replaced", "does not do so when the workers import it", "restart ComfyUI if files changed"
        file_server.fails(by_factory(cp={"world_size": 3}), *words)
    finally:
        (pack / file).write_text(before)
