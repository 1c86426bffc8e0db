"""The host's memory on GPUs: one copy of a model's weights for ComfyUI and all ranks, whatever the loader converts.

A real server with four fake CUDA devices (`support/stand_in`). It takes minutes of two cores, so `make soak` runs it.
"""

import time
from dataclasses import replace

import pytest
import torch
from support import checkpoints, processes, stand_in
from support.graphs import wan_prompt
from support.server import ComfyServer
from support.stand_in.memory import Ledger

pytestmark = pytest.mark.soak
LARGE = checkpoints.Checkpoint(architecture=checkpoints.Wan(dim=1024, heads=8, layers=6, ffn=4096))
LEFT = 0.1
MOST = {"plain": 1.1, "dynamic": 2.15}
"""DynamicVRAM keeps the weights as pages of the file. The ranks get them in fp16, in memory of their own: both count. The file's
pages are clean, so the system may drop them at any time."""
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
"""Has the C library and MKL give back at once what is freed."""


@pytest.fixture(scope="module", params=["plain", "dynamic"])
def host(request, comfyui_path, tmp_path_factory):
    """A server with four fake CUDA devices, which compute in the dtypes that ComfyUI chooses, and a bf16 file that runs as fp16;
    with DynamicVRAM or without.

    Yields a function that runs the model and returns what is taken of the host's memory for it, in sizes of the file; and one
    that has everybody drop it and does the same. Counted is the memory of ComfyUI and all its processes, pages of models and shared
    memory once (PSS), without libraries, which other programs share as they come and go, without what the fake devices hold, and
    without what was there when the model had been run and dropped once: libraries keep something from their first use. Two steps:
    in the first call behind a load the ranks use one of their two buffers for blocks, and the other one, which counts as the
    device's, has no memory yet.
    """
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(checkpoints.CHECKPOINTS, "large", LARGE)
        patched.setitem(checkpoints.LORAS, "large_lora", replace(checkpoints.LORAS["wan_t2v_lora"], base="large"))
        file = checkpoints.write("large", folder, dtype=torch.bfloat16)
        checkpoints.write("large_lora", folder)
    cards = stand_in.Cards(count=4, gigabytes=8, ledger=folder / "ledger", dynamic=request.param == "dynamic")
    ledger = Ledger(cards)
    options = {"args": ["--cache-classic"], "env": {**stand_in.environment(cards), **EXACT}}
    with ComfyServer(comfyui_path, models=folder, cpu=False, **options) as running:

        def counts(name):
            return not name.startswith("/") or name.startswith((str(folder), "/memfd:", "/dev/"))

        def taken():
            pids = [running.pid, *(child.pid for child in processes.descendants(running.pid))]
            held = sum(processes.pss_where(pid, counts) for pid in pids)
            return held - sum(ledger.tensors(card) + ledger.mapped(card) for card in range(cards.count))

        def run(strength, **settings):
            loras = [("large_lora", strength)] if strength else []
            running.run(wan_prompt(ckpt=file.stem, steps=2, loras=loras, **settings), timeout=300).check()
            return (taken() - base) / file.stat().st_size

        def drop():
            nonlocal base
            running.free_workers(60)
            deadline = time.monotonic() + 30  # ComfyUI forgets its own copy behind those of the ranks
            while (left := (taken() - base) / file.stat().st_size) > LEFT and time.monotonic() < deadline:
                time.sleep(0.5)
            base = taken()  # every prompt leaves a little in all six processes
            return left

        base = 0
        run(1.0)
        run(1.0, cp={"weights": "offloaded"})
        run(1.0, cp={"weights": "whole"})
        running.free_workers(60)
        time.sleep(10)
        base = taken()
        yield run, drop, MOST[request.param]


@pytest.mark.parametrize(
    ("weights", "weight_dtype", "strengths"),
    [
        ("whole", "default", (0, 1.0, 0.5)),
        ("offloaded", "default", (0, 1.0, 0.5)),
        ("whole", "fp8_e4m3fn", (0, 1.0)),
        ("sharded", "fp8_e4m3fn", (0, 1.0)),
    ],
)
def test_the_host_holds_the_file_once_for_all_ranks(host, weights, weight_dtype, strengths):
    """Loaded, with a LoRA, with another one and dropped."""
    run, drop, most = host
    most += 0.05 * (weights == "offloaded")  # a prompt leaves a MB or so in each of six processes: 0.03 of this file
    sizes = [run(strength, cp={"weights": weights}, weight_dtype=weight_dtype) for strength in strengths]
    assert max(sizes) <= most, sizes
    assert drop() <= LEFT


def test_the_host_holds_the_file_once_behind_a_run_without_ranks(host):
    run, drop, most = host
    run(1.0)
    assert run(1.0, cp={"weights": "whole"}) <= most
    assert drop() <= LEFT
