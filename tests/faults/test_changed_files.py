"""Case 42: a model file that changes while ComfyUI runs never gives another picture, and never ends ComfyUI."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.graphs import flux_prompt
from support.latents import assert_close
from support.server import CUSTOM_NODES, ComfyServer

CP = {"world_size": 2}
FACTORY_PACK = Path(__file__).parents[1] / "support" / "factory_pack"
FP8 = {"weight_dtype": "fp8_e4m3fn"}


@pytest.fixture(scope="module")
def models(checkpoints_dir, tmp_path_factory):
    """A folder with a model file, and others beside it to replace it with."""
    base = tmp_path_factory.mktemp("changing")
    (base / "diffusion_models").mkdir()
    source = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    shutil.copy(source, base / "original")
    with safe_open(source, "pt") as opened:
        tensors = {key: opened.get_tensor(key).flip(0).contiguous() for key in opened.keys()}  # noqa: SIM118
        save_file(tensors, base / "other", metadata=opened.metadata())
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
    assert "flux.safetensors changed on disk after ComfyUI had loaded it" in said
    assert "node changed" not in said
    assert (latent(file_server, **weights) == old).all()  # of its own copy
    file_server.free_first()
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
    for settings in ({}, {"cp": cp}):
        said = error(file_server, **settings)
        assert "flux.safetensors was cut off while ComfyUI used it" in said
        assert f"it has {size // 2} bytes, and had {size}" in said
    replace(models, "original")
    assert "was cut off" in error(file_server)  # it is another file, and the pages are of the old one
    file_server.free_first()
    assert (latent(file_server) == stock).all()
    assert_close(latent(file_server, cp=cp), stock)


def by_factory(kind: str = "plain", weight_dtype: str = "default", cp: dict | None = None) -> dict:
    """A graph whose model comes from a loader of another pack."""
    prompt = flux_prompt(cp=cp)
    inputs = {"unet_name": "flux.safetensors", "kind": kind, "weight_dtype": weight_dtype}
    prompt["loader"] = {"class_type": "TestFactoryLoader", "inputs": inputs}
    return prompt


@pytest.mark.parametrize(("kind", "weight_dtype"), [("plain", "default"), ("in a list", "fp8_e4m3fn")])
@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_a_loader_of_another_pack(file_server, kind, weight_dtype, weights):
    """The ranks call the pack's own function, which changes a weight, and import nothing of the pack that needs a server."""
    expected = file_server.sample(by_factory(kind, weight_dtype))
    assert_close(file_server.sample(by_factory(kind, weight_dtype, {**CP, "weights": weights}), timeout=120), expected)
    assert (latent(file_server, weight_dtype=weight_dtype) - expected).abs().max() > 0.05 * expected.std()


LOADERS = {
    "by name": "its arguments name no model file by its whole path",
    "of an object": "is a builtins.object, which cannot be sent",
    "in init": "it stands in the __init__.py of its pack",
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
        words = f"{file} changed on disk after ComfyUI had imported it. Restart ComfyUI"
        file_server.fails(by_factory(cp={"world_size": 3}), words)
    finally:
        (pack / file).write_text(before)
