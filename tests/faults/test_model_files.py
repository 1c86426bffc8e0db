"""Case 37: ranks read model files from the model folders only, and run nothing that is in one."""

import contextlib
import json
import os
import re
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
from support.faults import note
from support.graphs import flux_prompt
from support.pools import small_pool

from cp_runtime.comfy.shared.recipe import file_digest, file_stamp
from cp_runtime.controller.placement import Choice, Demand, Shortages
from cp_runtime.controller.workers import Workers
from cp_runtime.engine.weights.blocks import Sizes
from cp_runtime.errors import MirrorError, RankError
from cp_runtime.pool.channel import SharedBlock
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.messages import Load, Loaded
from cp_runtime.pool.protocol import TensorPacker, flatten
from cp_runtime.pool.worker_pool import WorkerPool
from cp_runtime.timing.times import Times

CP = {"world_size": 2}
REFUSED = "MirrorError: (unknown loader|malformed recipe: no str)"
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
    """Ranks with ComfyUI, which may read models from one folder."""
    site = WorkerSite(
        service="comfy.rank.service",
        arguments={"model_folders": [str(shelf / "models" / "diffusion_models")], "node_folders": [str(shelf / "packs")]},
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
    key: str = "differing"
    patches_uuid: str = "u"
    demand: Demand = NO_DEMAND

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        recipe = {**RECIPE, "path": self.path, "stamp": list(file_stamp(self.path))}
        return Load(key=self.key, recipe=recipe, patches=[], patches_uuid=self.patches_uuid), TensorPacker()

    def verify(self, request: Load, payload: torch.Tensor, loaded: Sequence[Loaded], pids: Sequence[int]) -> None:
        assert all(maps(pid, self.path) for pid in pids)
        raise MirrorError("another weight")


def maps(pid: int, path: str) -> bool:
    return path in Path(f"/proc/{pid}/maps").read_text()


def test_ranks_drop_a_model_that_failed_to_load(model_ranks, shelf):
    """Nothing else would ever free it: the controller has no record of it."""
    folder = shelf / "models" / "diffusion_models"
    path = str(shutil.copy(folder / "flux.safetensors", folder / "differing.safetensors"))
    workers = Workers(model_ranks.config, model_ranks.site, lambda: None, Shortages(), Times())
    workers.pool = model_ranks
    pids = list(model_ranks.pids)
    with pytest.raises(MirrorError):
        workers.load(model_ranks.config, Differing(path), Choice("whole", ""), lambda: False)
    assert model_ranks.pids == pids
    assert not any(maps(pid, path) for pid in pids)
    os.unlink(path)


OUTSIDE = {
    "beside the models": "{base}/secret.safetensors",
    "two dots": "{inside}/../../secret.safetensors",
    "one level of two dots": "{inside}/../secret.safetensors",
    "a name that begins alike": "{base}/models/diffusion_models2/secret.safetensors",
    "two dots and a name that begins alike": "{inside}/../diffusion_models2/secret.safetensors",
    "doubled slashes": "{base}//models//diffusion_models2///secret.safetensors",
    "two dots behind a link": "{inside}/link/../secret.safetensors",
    "a device": "/dev/null",
    "a file of the system": "/etc/hostname",
    "memory of a process": "/proc/self/mem",
    "the folder of all models": "{base}/models",
}


def test_the_workers_read_models_from_the_model_folders_only(model_ranks, shelf):
    inside = shelf / "models" / "diffusion_models"
    pids, taken = list(model_ranks.pids), {}
    for path in (inside / "flux.safetensors", inside / "." / "flux.safetensors", inside / "link" / "secret.safetensors"):
        assert mirror(model_ranks, str(path)) == ""  # links in the model folders are the user's
    for name, pattern in OUTSIDE.items():
        path = pattern.format(base=shelf, inside=inside)
        if not os.path.exists(path):
            continue
        said = mirror(model_ranks, path)  # behind a link, two dots may also mean a file in the folder, which is not there
        if not re.match(r"MirrorError: (\S+ is outside of ComfyUI's model folders\. Move|the model file \S+ cannot be read)", said):
            taken[name] = said or "loaded"
    note("37 paths outside of the model folders", "read", 0, len(taken))
    assert taken == {}
    assert model_ranks.pids == pids


SITE = """
import contextlib
import json
import comfy.cli_args
comfy.cli_args.args.cpu = True
from support.package import load_package
load_package()
from cp_runtime.comfy.ui.runtime import worker_site
print(json.dumps(worker_site().arguments["model_folders"]))
"""


def test_model_folders_are_those_of_weights(comfyui_path, tmp_path):
    """Not those of node packs and data sets, which ComfyUI keeps in the same table."""
    program = tmp_path / "folders.py"
    program.write_text(SITE)
    path = os.pathsep.join([str(comfyui_path), str(Path(__file__).parents[1])])
    done = preloaded.run([str(program)], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    names = {Path(folder).name for folder in json.loads(done.stdout.splitlines()[-1])}
    assert {"diffusion_models", "unet", "checkpoints"} <= names
    assert not names & {"custom_nodes", "datasets", "configs"}


@pytest.mark.parametrize("loader", ["load_torch_file", "os.system", "__class__", "", None, 5, ["load_diffusion_model"]])
def test_the_workers_call_the_known_loaders_only(loader, model_ranks, shelf):
    said = mirror(model_ranks, str(shelf / "models" / "diffusion_models" / "flux.safetensors"), loader=loader)
    assert re.match(REFUSED, said)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "load"}, {"dtype": "__class__"}, {"custom_operations": "os"}, {"load_device": "cpu"}, {"dtype": ["float32"]}],
)
def test_the_workers_take_the_known_options_only(options, model_ranks, shelf):
    said = mirror(model_ranks, str(shelf / "models" / "diffusion_models" / "flux.safetensors"), options=options)
    assert said.startswith("MirrorError: ")


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
    shutil.copy(file, shelf / "elsewhere")
    model = str(shelf / "models" / "diffusion_models" / "flux.safetensors")
    stamp = list(file_stamp(model))
    factory = {
        "file": str(file), "function": "load", "arguments": [model], "place": None, "node": "",
        "sources": [[str(file), file_digest(str(file))]], "models": [[model, stamp]],
    }  # fmt: skip
    return factory, marker, model


def test_the_workers_call_loaders_of_node_packs(model_ranks, pack):
    factory, marker, model = pack
    assert mirror(model_ranks, model, loader="factory", factory=factory) == ""
    assert marker.exists()


def elsewhere(factory):
    file = factory["file"].replace("/packs/pack/", "/elsewhere/")
    return {"file": file, "sources": [[file, file_digest(file)]]}


FORGED = {
    "a file outside of the packs": (elsewhere, "outside of ComfyUI's folders of node packs"),
    "two dots": (
        lambda f: elsewhere(f) | {"file": (bad := f["file"].replace("/pack/", "/../elsewhere/")), "sources": [[bad, "0"]]},
        "outside of ComfyUI's folders of node packs",
    ),
    "a file without a digest": (lambda f: {"sources": []}, "without the digest"),
    "another digest": (lambda f: {"sources": [[f["file"], "0" * 64]]}, "changed on disk after ComfyUI had imported it"),
    "another model file": (lambda f: {"models": [["/etc/hostname", list(file_stamp("/etc/hostname"))]]}, "model folders"),
    "a path beside the model files": (lambda f: {"arguments": [*f["arguments"], "/etc/hostname"]}, "is no model file of it"),
    "a path inside of an argument": (lambda f: {"arguments": [{"$dict": [["x", "/etc/hostname"]]}]}, "is no model file of it"),
    "a list for a name": (lambda f: {"function": ["load"]}, "malformed recipe"),
    "a number for the sources": (lambda f: {"sources": 5}, "malformed recipe"),
    "a text for a stamp": (lambda f: {"models": ["x"]}, "malformed recipe"),
    "one field too many": (lambda f: {"code": "x"}, "malformed recipe"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_loaders_of_node_packs_are_refused_before_anything_of_them_runs(case, model_ranks, pack):
    factory, marker, model = pack
    change, words = FORGED[case]
    said = mirror(model_ranks, model, loader="factory", factory={**factory, **change(factory)})
    assert said.startswith("MirrorError: ")
    assert words in said
    assert not marker.exists()


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


@pytest.mark.parametrize("loader", ["load_diffusion_model", "load", None])
def test_a_loader_has_one_name(loader, model_ranks, pack):
    factory, marker, model = pack
    assert re.match(REFUSED, mirror(model_ranks, model, loader=loader, factory=factory))
    assert mirror(model_ranks, model, loader="factory").startswith("MirrorError: unknown loader")
    assert not marker.exists()


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
