"""Model files and loaders of node packs on ranks; nothing that is in a file is run."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import preloaded
from support.evil import Evil
from support.graphs import flux_prompt
from support.pools import small_pool

from cp_runtime.comfy.shared.recipe import file_stamp
from cp_runtime.controller.placement import Choice, Demand, Shortages
from cp_runtime.controller.workers import Workers
from cp_runtime.engine.weights.blocks import Sizes
from cp_runtime.errors import MirrorError, RankError
from cp_runtime.pool.blocks import SharedBlock
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.messages import Load, Loaded
from cp_runtime.pool.protocol import TensorPacker, flatten
from cp_runtime.pool.worker_pool import WorkerPool
from cp_runtime.timing.times import Times

CP = {"world_size": 2}
RECIPE = {"loader": "load_diffusion_model", "options": {}, "factory": None, "dynamic": False}


def write_evil(folder: Path, marker: Path) -> list[Path]:
    """Checkpoints that would run a command when they are unpickled, in torch's file format and its old one."""
    files = []
    for name, new in (("evil.ckpt", True), ("evil_old.ckpt", False), ("evil.pt", True)):
        files.append(folder / name)
        torch.save({"state_dict": {"x": Evil(marker)}}, files[-1], _use_new_zipfile_serialization=new)
    return files


@pytest.fixture(scope="module")
def model_ranks(comfyui_path, shelf):
    """Ranks with ComfyUI."""
    site = WorkerSite(
        service="comfy.rank.service",
        path=(str(comfyui_path),),
        preload=("torch", "cp_runtime.comfy.rank.preload"),
        argv=("main.py", "--cpu", "--base-directory", str(shelf)),
    )
    with small_pool(site=site) as pool:
        yield pool


def load(pool: WorkerPool, packer: TensorPacker, **fields: Any) -> None:
    """Have the ranks load a model, with the tensors of its patches in memory that they keep, as the controller does."""
    with contextlib.closing(SharedBlock()) as memory:
        packer.write(memory.view(packer.nbytes))
        pool.request(Load(memory=(os.getpid(), memory.fd), **fields), timeout=60)


def mirror(pool: WorkerPool, path: str, **changes: object) -> str:
    """Ask the ranks to load a model file; what their error says, or nothing."""
    recipe = {**RECIPE, "path": path, "stamp": list(file_stamp(path)), **changes}
    try:
        load(pool, TensorPacker(), key=f"k{time.monotonic_ns()}", recipe=recipe, patches=[], patches_uuid="u")
    except RankError as error:
        return f"{error.kind}: {error.message}"
    return ""


def patch_memory(pool: WorkerPool) -> tuple[int, int]:
    """Bytes that no file has, of all ranks together; and how many pieces of shared memory of more than PATCH_BYTES they map."""
    anonymous, mapped = 0, set()
    for pid in pool.pids:
        status, maps = (Path(f"/proc/{pid}/{name}").read_text().splitlines() for name in ("status", "maps"))
        anonymous += 1024 * sum(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if "memfd:" in line and last - first >= PATCH_BYTES:
                mapped.add(line.split()[4])
    return anonymous, len(mapped)


PATCH_BYTES = 64 << 20


def test_tensors_of_a_lora_are_there_once_for_all_ranks(model_ranks, shelf):
    path = str(shelf / "models" / "diffusion_models" / "flux.safetensors")
    up, down = torch.zeros(768, PATCH_BYTES // 4 // 1024), torch.zeros(PATCH_BYTES // 4 // 1024, 256)
    adapter = ("adapter", "LoRAAdapter", [], (up, down, 4.0, None, None, None))

    def load_patched(strength: float) -> tuple[int, int]:
        packer = TensorPacker()
        patches = (
            [["diffusion_model.double_blocks.0.img_attn.qkv.weight", [(strength, adapter, 1.0, None, None)]]] if strength else []
        )
        tree = flatten(patches, packer.add)
        recipe = RECIPE | {"path": path, "stamp": list(file_stamp(path))}
        load(model_ranks, packer, key="lora", recipe=recipe, patches=tree, patches_uuid=str(strength))
        return patch_memory(model_ranks)

    before, blocks = load_patched(0.0)
    load_patched(1.0)
    after, with_lora = load_patched(0.5)
    assert after - before < 0.3 * PATCH_BYTES
    assert with_lora == blocks + 1
    assert load_patched(0.0)[1] == blocks


NO_DEMAND = Demand(Sizes(0, 0, 0), 0.0)


@dataclass(frozen=True)
class Differing:
    """A model as its owner has it, which is another one than the ranks load."""

    path: str
    name: str = "differing.safetensors"
    key: str = "differing"
    patches_uuid: str = "u"
    demand: Demand = NO_DEMAND
    loader_code: None = None

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        recipe = {**RECIPE, "path": self.path, "stamp": list(file_stamp(self.path))}
        return Load(key=self.key, recipe=recipe, patches=[], patches_uuid=self.patches_uuid), TensorPacker()

    def verify(self, request: Load, payload: torch.Tensor, loaded: Sequence[Loaded], pids: Sequence[int], ask: Any) -> None:
        assert all(maps(pid, self.path) for pid in pids)
        raise MirrorError("another weight")


def maps(pid: int, path: str) -> bool:
    return path in Path(f"/proc/{pid}/maps").read_text()


def test_ranks_drop_a_model_that_failed_to_load(model_ranks, shelf):
    """Nothing else would ever free it: the controller has no record of it."""
    folder = shelf / "models" / "diffusion_models"
    path = str(shutil.copy(folder / "flux.safetensors", folder / "differing.safetensors"))
    workers = Workers(model_ranks.config, model_ranks.site, lambda: None, Shortages(), Times())
    workers.pool = workers.models._pool = model_ranks
    pids = list(model_ranks.pids)
    with pytest.raises(MirrorError):
        workers.models.load(model_ranks.config, Differing(path), Choice("whole", ""), lambda: False)
    assert model_ranks.pids == pids
    assert not any(maps(pid, path) for pid in pids)
    os.unlink(path)


FOLDERS = """
import json, os, sys
from support.package import load_package
load_package()
sys.path.insert(0, os.environ["COMFYUI_PATH"])
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
from cp_runtime.comfy.rank.relocated import _model_folders
print(json.dumps(list(_model_folders())))
"""


def test_another_computer_reads_models_from_folders_of_weights(comfyui_path, tmp_path):
    """Not from those of node packs and data sets, which ComfyUI keeps in the same table."""
    program = tmp_path / "folders.py"
    program.write_text(FOLDERS)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COMFYUI_PATH": str(comfyui_path)}
    done = preloaded.run([str(program)], env=env)
    assert done.returncode == 0, done.stderr
    kinds = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"diffusion_models", "checkpoints", "vae"} <= kinds
    assert not kinds & {"custom_nodes", "datasets", "configs"}


PACK_FILE = """
import pathlib
import comfy.sd
pathlib.Path({marker!r}).touch()
class Loader: pass
def load(path):
    return comfy.sd.load_diffusion_model(path)
"""


@pytest.fixture
def pack(shelf, tmp_path):
    """A file in the folder of node packs that notes that it was imported, and the recipe of a model that it loads."""
    file, marker = shelf / "packs" / "pack" / f"p{time.monotonic_ns()}.py", tmp_path / "marker"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PACK_FILE.format(marker=str(marker)))
    (file.parent / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}")
    model = str(shelf / "models" / "diffusion_models" / "flux.safetensors")
    stamp = list(file_stamp(model))
    factory = {
        "folder": str(shelf / "packs"), "file": str(file), "function": "load", "arguments": [model], "place": None, "node": "",
        "models": [[model, stamp]],
    }  # fmt: skip
    return factory, marker, model


def test_the_workers_call_loaders_of_node_packs(model_ranks, pack):
    factory, marker, model = pack
    assert mirror(model_ranks, model, loader="factory", factory=factory) == ""
    assert marker.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"function": "Loader"}, "has no function 'Loader'"),
        ({"function": "comfy"}, "has no function"),
        ({"arguments": []}, "TypeError"),
    ],
)
def test_names_in_node_packs_that_are_no_loaders(change, words, model_ranks, pack):
    factory, _, model = pack
    assert words in mirror(model_ranks, model, loader="factory", factory={**factory, **change})
    assert mirror(model_ranks, model) == ""


def test_the_workers_run_nothing_in_a_checkpoint(model_ranks, shelf, tmp_path):
    marker = tmp_path / "marker"
    for path in write_evil(shelf / "models" / "diffusion_models", marker):
        for loader in ("load_diffusion_model", "load_checkpoint_guess_config"):
            said = mirror(model_ranks, str(path), loader=loader)
            assert "UnpicklingError" in said or "weights_only" in said.lower(), said
            assert not marker.exists()
        torch.load(path, weights_only=False)  # and it would have
        assert marker.exists()
        marker.unlink()


def test_a_checkpoint_in_a_graph_runs_nothing(graph_server, shelf, tmp_path):
    marker, ranks = tmp_path / "marker", graph_server.worker_pids()
    for folder in ("diffusion_models", "checkpoints"):
        write_evil(shelf / "models" / folder, marker)
    for name in ("evil.ckpt", "evil_old.ckpt", "evil.pt"):
        prompt = flux_prompt(cp=CP)
        prompt["loader"]["inputs"]["unet_name"] = name
        checkpoint = flux_prompt(cp=CP)
        checkpoint["loader"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}}
        for graph in (prompt, checkpoint):
            error = graph_server.fails(graph)
            assert error.node_id == "loader"
            assert "weights_only" in error.exception_message.lower()
            assert not marker.exists()
    assert graph_server.worker_pids() == ranks
    assert "loading evil" not in graph_server.log_text()
