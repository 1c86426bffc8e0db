"""CP VAE Decode: what ends a call in its middle ends the prompt as promised, and the next one is right."""

import os
import shutil
import time

import pytest
from support.faults import Stopwatch
from support.vae_graphs import vae_prompt

BOUND = 1e-5
MODES = ("exact", "tiles")
SELDOM = ("exact", pytest.param("tiles", marks=pytest.mark.soak))


@pytest.fixture(scope="module")
def expected(pool_server, vae_files):
    modes = {"exact": None, "tiles": "tiled"}
    return {mode: pool_server.sample(vae_prompt("kl", "decode", stock)) for mode, stock in modes.items()}


def decode(mode, **size):
    return vae_prompt("kl", "decode", mode, again=True, **size)


def assert_right(server, expected, mode):
    out = server.sample(decode(mode))
    assert (out - expected[mode]).abs().max() <= BOUND * expected[mode].abs().max()
    return server.worker_pids()


@pytest.mark.parametrize("mode", SELDOM)
def test_a_killed_rank(pool_server, expected, faults, mode):
    pids = assert_right(pool_server, expected, mode)
    faults.arm(1, "kill", module=2)
    watch = Stopwatch(f"2 SIGKILL of rank 1 of 2 in a VAE, {mode}")
    pool_server.fails(decode(mode), f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    watch.within(2, "the prompt has ended, from its start")
    assert not set(pids) & set(assert_right(pool_server, expected, mode))


@pytest.mark.parametrize("mode", MODES)
def test_cancel(pool_server, expected, faults, mode):
    pids = assert_right(pool_server, expected, mode)
    faults.arm(1, "slow", module=1, seconds=0.4)
    prompt_id = pool_server.queue(decode(mode, rows=12))  # of a size that is new: how long it takes is not known
    pool_server.wait_event(lambda e: e.type == "executing" and e.data.get("node") == "run" and e.data["prompt_id"] == prompt_id)
    time.sleep(0.8)
    watch = Stopwatch(f"28 Cancel inside a VAE, {mode}")
    pool_server.interrupt()
    result = pool_server.wait(prompt_id, 30)
    watch.within(2, "the prompt ends")
    assert result.status == "interrupted"
    assert assert_right(pool_server, expected, mode) == pids


@pytest.mark.parametrize("mode", SELDOM)
def test_out_of_memory(pool_server, expected, faults, mode):
    """Once: room is made, and the call is tried again. Twice: an error, and not tiles in the place of the exact picture."""
    assert_right(pool_server, expected, mode)
    faults.arm(1, "oom", module=2)
    assert_right(pool_server, expected, mode)
    assert not faults.waiting
    faults.arm(1, "oom", module=2, times=2)
    pool_server.fails(decode(mode), "OutOfMemoryError: injected", "you ran out of memory on your GPU")  # ComfyUI's words
    assert not faults.waiting
    assert_right(pool_server, expected, mode)


def test_free(pool_server, expected):
    pids = assert_right(pool_server, expected, "exact")
    assert "kl_vae.safetensors" in pool_server.status()["models"]
    pool_server.free_workers()
    assert assert_right(pool_server, expected, "exact") == pids


def test_progress_counts_tiles_and_convolutions(pool_server, expected, faults):
    for mode in ("exact", "tiles"):
        assert_right(pool_server, expected, mode)
        faults.arm(1, "slow", module=1, seconds=0.1)
        prompt_id = pool_server.queue(decode(mode))
        pool_server.wait(prompt_id).check()
        progress = [e.data for e in pool_server.events if e.type == "progress" and e.data["prompt_id"] == prompt_id]
        values = [data["value"] for data in progress]
        assert len(values) >= 3
        assert values == sorted(values)


@pytest.mark.bits("the same decode, of a file with the same bytes")
@pytest.mark.usefixtures("vae_files")
def test_a_file_that_is_written_to(pool_server, checkpoints_dir):
    """ComfyUI's process and the ranks keep the VAE as it was loaded."""
    original, file = (checkpoints_dir / "vae" / f"{name}_vae.safetensors" for name in ("kl", "cut"))
    shutil.copy(original, file)

    def decoded(mode):
        prompt = vae_prompt("kl", "decode", mode, again=mode is not None)
        prompt["vae"]["inputs"]["vae_name"] = file.name
        return pool_server.sample(prompt)

    def write(place, content):
        with file.open("r+b") as opened:
            opened.seek(place, os.SEEK_END)
            opened.write(content)

    stock = decoded(None)
    write(-4096, bytes(4096))  # before the ranks have it
    first, pids, size = decoded("exact"), pool_server.worker_pids(), file.stat().st_size
    assert (first - stock).abs().max() <= BOUND * stock.abs().max()
    write(-size // 2, bytes(size // 2))
    assert (decoded("exact") == first).all()
    os.truncate(file, size // 2)
    assert (decoded("exact") == first).all()
    shutil.copy(original, checkpoints_dir / "new")
    os.replace(checkpoints_dir / "new", file)
    pool_server.free_first()
    assert (decoded("exact") == first).all()
    assert pool_server.worker_pids() == pids
