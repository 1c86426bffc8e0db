"""Weights out of safetensors files: mapped where they fit, and refused by name where they do not."""

import json
import math
import mmap
import os
import struct

import psutil
import pytest
import torch
from safetensors.torch import save_file
from support import processes
from torch import nn

from cp_runtime import map_weights
from cp_runtime.engine.weights.pages import give_back
from cp_runtime.errors import ConfigError
from cp_runtime.system import system


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.register_buffer("table", torch.zeros(3))


def empty():
    with torch.device("meta"):
        return Model()


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape).to(torch.bfloat16) for name, tensor in Model().state_dict().items()}


def mapped_ranges(file):
    """Where a file is mapped in this process."""
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if line.split()[4] == str(file.stat().st_ino)]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


@pytest.mark.parametrize("how", ["file", "folder", "index"])
def test_weights_are_pages_of_the_files(how, weights, tmp_path):
    names = sorted(weights)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]} if how == "index" else {"model.safetensors": names}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    if how == "index":
        where = {name: file for file, held in parts.items() for name in held}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    model = empty()
    with torch.inference_mode():  # in which nothing may come out that is good for inference only
        map_weights(model, tmp_path / "model.safetensors" if how == "file" else str(tmp_path))
    ranges = [span for file in parts for span in mapped_ranges(tmp_path / file)]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
        assert tensor.dtype == torch.bfloat16
        assert any(low <= tensor.data_ptr() < high for low, high in ranges)
        assert not tensor.is_inference()
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_file_that_is_larger_than_memory(tmp_path):
    """A sparse one. The kernel refuses to map it like memory that could all be written to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + psutil.swap_memory().total + (1 << 30)
    tensors = {"weight": [total // 1024, 256], "bias": [total // 1024]}
    header, at = {}, 0
    for name, shape in tensors.items():
        nbytes = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + at)
    with torch.device("meta"):
        model = nn.Linear(256, total // 1024)
    map_weights(model, tmp_path)
    model.weight.data[5, 5] = 3.0  # stays in this process
    assert model.weight[5].sum() == 3
    del model
    assert mapped_ranges(tmp_path / "model.safetensors") == []


def test_pages_that_were_read_are_given_back(tmp_path):
    file, model = tmp_path / "model.safetensors", nn.Linear(512, 512)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, file)
    with torch.device("meta"):
        read = nn.Linear(512, 512)
    map_weights(read, file)

    def resident():
        return processes.pss_where(os.getpid(), str(file).__eq__)

    for _ in range(2):
        assert torch.equal(read.weight, model.weight)
        assert resident() > read.weight.nbytes / 2
        give_back(read.parameters(), [(start, stop) for start, stop, _ in system.file_ranges(str(file))])
        assert resident() < 16 << 10


def test_where_files_are_mapped(tmp_path):
    file, model = tmp_path / "model.safetensors", nn.Linear(512, 512)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, file)
    map_weights(model, file)
    begin, end = model.weight.data_ptr(), model.weight.data_ptr() + model.weight.nbytes
    start, stop, place = next(each for each in system.file_ranges(str(file)) if each[0] <= begin < each[1])
    assert (start, stop, str(file)) in system.mapped_files()
    with file.open("rb") as content:
        content.seek(place + begin - start)
        assert content.read(model.weight.nbytes) == model.weight.detach().numpy().tobytes()
    assert not system.is_written(begin, end)
    model.weight.data[511, 511] = 3.0
    assert system.is_written(begin, end)
    assert not system.is_written(begin, begin + mmap.PAGESIZE)
    file.rename(tmp_path / "away")
    save_file({"other": torch.zeros(3)}, file)
    assert system.file_ranges(str(file)) == []  # another file has its name


def refused(model, path, *words):
    before = dict(model.state_dict(keep_vars=True))
    with pytest.raises(ConfigError) as caught:
        map_weights(model, path)
    assert [word for word in words if word not in str(caught.value)] == []
    assert all(tensor is before[name] for name, tensor in model.state_dict(keep_vars=True).items())


def test_files_that_do_not_fit_the_model(weights, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if name != "table"}, file)
    refused(empty(), file, str(file), "missing: table", "config.json")
    save_file({**weights, **{f"more.{i}": torch.zeros(1) for i in range(6)}}, file)
    refused(empty(), file, "unexpected: more.0, more.1, more.2, more.3 and 2 more", "config.json")
    save_file({**weights, "table": torch.zeros(4)}, file)
    refused(empty(), file, "of another shape: table [4], not [3]", "config.json")


def test_files_that_cannot_be_read(weights, tmp_path):
    refused(empty(), tmp_path, str(tmp_path), "a .safetensors file, or a folder")
    refused(empty(), tmp_path / "none.safetensors", "none.safetensors", "Check it")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no header")
    refused(empty(), broken, "broken.safetensors cannot be read", "download it again")
    save_file(weights, tmp_path / "good.safetensors")
    refused(empty(), tmp_path, "broken.safetensors, good.safetensors", "Pass")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refused(empty(), tmp_path, str(index), "Download")
    index.write_text(json.dumps({"weight_map": {"table": "gone.safetensors"}}))
    refused(empty(), tmp_path, "gone.safetensors", "Check it")


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_what_the_files_do_not_hold_must_be_there(kind, weights, tmp_path):
    """A model computes some tensors when it is built: on the meta device they have no numbers."""
    save_file(weights, tmp_path / "model.safetensors")
    model = empty()
    computed = torch.arange(3, device="meta")
    if kind == "buffer":
        model.blocks[1].register_buffer("computed", computed, persistent=False)
    else:
        model.blocks[1].computed = computed
    refused(model, tmp_path, "blocks.1.computed", "init_empty_weights")
    model.blocks[1].computed = torch.arange(3)
    map_weights(model, tmp_path)
