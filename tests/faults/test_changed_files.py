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
from support.server import ComfyServer

CP = {"world_size": 2}
FP8 = {"weight_dtype": "fp8_e4m3fn"}
ALIGNED = 1e-5  # of stock with weights at other addresses


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
def file_server(comfyui_path, models):
    # What ComfyUI holds is not to depend on how much memory other programs have left.
    with ComfyServer(comfyui_path, models=models, args=["--cache-classic"]) as running:
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
    [
        pytest.param(by_rename, {}, marks=pytest.mark.soak),
        pytest.param(by_rename_with_the_same_time, {}, marks=pytest.mark.soak),
        (in_place_with_the_same_time, {}),
        (in_place_with_the_same_time, FP8),
    ],
)
def test_file_replaced_before_the_ranks_load_it(file_server, models, change, weights):
    """ComfyUI holds the old model, from a prompt without context parallelism; the ranks get that one."""
    old = latent(file_server, **weights)
    change(models)
    assert_close(latent(file_server, cp=CP, **weights), old)
    assert_close(latent(file_server, **weights), old, ALIGNED)
    file_server.free_first()
    new = latent(file_server, **weights)
    assert (new - old).abs().max() > 0.5 * old.std()  # or nothing would be proved
    assert_close(latent(file_server, cp=CP, **weights), new)


def test_weight_changed_in_place_with_a_weight_dtype(file_server):
    changed = {"model_nodes": [("TestPatch", {"kind": "changed_weight"})], "weight_dtype": "fp8_e5m2"}
    plain, expected = latent(file_server, weight_dtype="fp8_e5m2"), latent(file_server, **changed)
    assert_close(latent(file_server, cp=CP, **changed), expected)
    assert (expected - plain).abs().max() > 1e-3


@pytest.mark.parametrize("placement", ["whole", "sharded"])
def test_truncated_file(file_server, models, placement):
    """It ends no process: none reads it any more."""
    cp = {**CP, "weights": placement}
    stock = latent(file_server)
    latent(file_server, cp=cp)
    os.truncate(model_file(models), model_file(models).stat().st_size // 2)
    assert_close(latent(file_server, cp=cp), stock)
    assert_close(latent(file_server), stock, ALIGNED)
    file_server.post("/context_parallel/restart")
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
def test_file_overwritten_between_prompts(file_server, models, pictures, placement, change):
    """In place, between two prompts: the old content everywhere, until ComfyUI loads the file again."""
    cp = {**CP, "weights": placement}
    assert_close(latent(file_server, cp=cp), pictures[0])
    OVERWRITTEN[change](models)
    assert_close(latent(file_server, cp=cp), pictures[0])
    assert_close(latent(file_server), pictures[0])
    file_server.free_first()
    assert_close(latent(file_server, cp=cp), pictures[1])
    assert_close(latent(file_server), pictures[1])


@pytest.fixture(scope="module")
def merge(models):
    """A graph that merges the model of the file with that of a second one."""
    shutil.copy(models / "original", model_file(models).with_name("second.safetensors"))
    other = {"other": ("UNETLoader", {"unet_name": "flux.safetensors", "weight_dtype": "default"})}
    node = ("ModelMergeSimple", {"model1": MODEL, "model2": ["other", 0], "ratio": 0.3})
    return {"ckpt": "second", "others": other, "model_nodes": [node]}


@pytest.fixture(scope="module")
def merged(models, file_server, merge):
    """The latents of merges with the original and with the other file."""
    made = []
    for name in ("other", "original"):
        replace(models, name)
        file_server.free_first()
        made.insert(0, latent(file_server, **merge))
    assert (made[0] - made[1]).abs().max() > 0.1 * made[0].std()
    return made


@pytest.mark.parametrize("cp", [None, CP], ids=["stock", "ranks"])
def test_file_overwritten_before_a_merge(file_server, models, merge, merged, cp):
    """ComfyUI has the model from a prompt on ranks."""
    latent(file_server, cp=CP)
    in_place(models)
    assert_close(latent(file_server, cp=cp, **merge), merged[0])
    file_server.free_first()
    assert_close(latent(file_server, cp=cp, **merge), merged[1])


def test_file_overwritten_after_a_merge(file_server, models, merge):
    """ComfyUI keeps the merge, and patches it with a LoRA."""
    lora = ("LoraLoaderModelOnly", {"lora_name": "flux_lora.safetensors", "strength_model": 0.7})
    patched = {**merge, "model_nodes": [*merge["model_nodes"], lora]}
    expected = latent(file_server, **patched)
    file_server.free_first()
    latent(file_server, cp=CP)
    latent(file_server, cp=CP, **merge)
    in_place(models)
    assert_close(latent(file_server, cp=CP, **patched), expected)
    assert_close(latent(file_server, **patched), expected)


LONG = {"steps": 40, "width": 128, "height": 128}


def copied_over(base: Path) -> None:
    """As `cp` does it: the file is empty for a moment."""
    shutil.copyfile(base / "other", model_file(base))


COPIED = pytest.param("whole", "copied over", marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def long(models, file_server):
    replace(models, "original")
    file_server.free_first()
    return latent(file_server, **LONG)


@pytest.mark.parametrize(("placement", "change"), [*every("same size", "its time put back"), COPIED])
def test_file_overwritten_during_a_prompt(file_server, models, pictures, long, placement, change):
    cp = {**CP, "weights": placement}
    running = file_server.queue(flux_prompt(cp=cp, **LONG))
    file_server.wait_for_step(running)
    {**OVERWRITTEN, "copied over": copied_over}[change](models)
    assert len(file_server.steps(running)) < LONG["steps"] // 2  # in time
    assert_close(file_server.latent(file_server.wait(running, timeout=60)), long)
    assert_close(latent(file_server, cp=cp), pictures[0])


@pytest.mark.parametrize(
    "placement", [pytest.param(each, marks=() if each in ("whole", "sharded") else pytest.mark.soak) for each in PLACEMENTS]
)
def test_ranks_keep_a_replaced_file(file_server, models, placement):
    """To the end, also when they read it again for a LoRA."""
    cp, loras = {**CP, "weights": placement}, [("flux_lora", 0.7)]
    expected, patched = latent(file_server), latent(file_server, loras=loras)
    assert_close(latent(file_server, cp=cp), expected)
    by_rename(models)
    assert_close(latent(file_server, cp=cp, loras=loras), patched)
    assert_close(latent(file_server, cp=cp), expected)


@pytest.mark.bits("the same call twice")
def test_ranks_keep_an_overwritten_lora(file_server, models):
    cp = {"cp": CP, "loras": [("flux_lora", 0.7)]}
    before = latent(file_server, **cp)
    with open(models / "loras" / "flux_lora.safetensors", "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    assert (latent(file_server, **cp) == before).all()
