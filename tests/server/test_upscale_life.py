"""CP Upscale Image: what ends it in its middle ends the prompt as promised, and the next one is right."""

import os
import shutil

import pytest
from support.faults import Stopwatch
from support.upscalers import upscale_prompt

SMALL = {"width": 130, "height": 47}
WIDE = {"width": 700, "height": 60}  # two tiles
LARGE = {"width": 1300, "height": 1027}  # nine, in three groups

pytestmark = pytest.mark.usefixtures("upscalers")


def assert_right(server, expected):
    assert (server.sample(upscale_prompt("compact", 2, **WIDE, again=True)) == expected).all()
    return server.worker_pids()


@pytest.fixture(scope="module")
def expected(pool_server):
    return pool_server.sample(upscale_prompt("compact", **WIDE))


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_killed_rank(pool_server, expected, faults, group):
    pids = assert_right(pool_server, expected)
    kill = {"kind": "kill", "module": 1}
    faults.arm(1, **(kill if group == 1 else {"kind": "slow", "seconds": 0, "then": kill}))
    pool_server.fails(upscale_prompt("compact", 2, **LARGE, again=True), f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    assert not set(pids) & set(assert_right(pool_server, expected))


def counted(server, prompt_id):
    """Values and totals of the progress of a prompt."""
    shown = [event.data for event in server.events if event.type == "progress" and event.data["prompt_id"] == prompt_id]
    return [each["value"] for each in shown], {each["max"] for each in shown}


@pytest.mark.parametrize(("size", "steps", "until"), [(SMALL | {"frames": 12}, 6, 2), (LARGE, 5, 3)])
def test_cancel(pool_server, expected, faults, size, steps, until):
    """Also after the first of several groups, which ComfyUI's node blends meanwhile."""
    pids = assert_right(pool_server, expected)
    faults.arm(1, "slow", module=1, seconds=0.4, times=3)
    prompt_id = pool_server.queue(upscale_prompt("compact", 2, **size, again=True))
    pool_server.wait_event(
        lambda event: event.type == "progress" and event.data["prompt_id"] == prompt_id and event.data["value"] >= until
    )
    watch = Stopwatch("Cancel inside an upscaling")
    pool_server.interrupt()
    assert pool_server.wait(prompt_id, 30).status == "interrupted"
    watch.within(2, "the prompt ends")
    faults.clear()
    values, totals = counted(pool_server, prompt_id)
    assert (values, totals) == (sorted(values), {steps})
    assert assert_right(pool_server, expected) == pids


def test_progress_goes_on_from_group_to_group(pool_server, faults):
    faults.arm(1, "slow", module=1, seconds=0.3, times=3)
    prompt_id = pool_server.queue(upscale_prompt("compact", 2, **LARGE, again=True))
    pool_server.wait(prompt_id).check()
    values, totals = counted(pool_server, prompt_id)
    assert (values, totals) == (sorted(values), {5})
    assert values[-1] > 3
    assert not faults.waiting


@pytest.mark.soak  # tiles get there as those of a VAE do
def test_another_computer(pool_server, expected):
    prompt = upscale_prompt("compact", 2, **WIDE)
    prompt["cp_config"]["inputs"] |= {"devices": "cpu,gpubox/cpu", "world_size": 0}
    assert (pool_server.sample(prompt, timeout=120) == expected).all()
    assert [rank["device"] for rank in pool_server.status()["ranks"]] == ["cpu", "gpubox/cpu"]


def test_free(pool_server, expected):
    pids = assert_right(pool_server, expected)
    assert "SRVGGNetCompact" in pool_server.status()["models"]
    pool_server.free_workers()
    assert assert_right(pool_server, expected) == pids


def test_a_file_that_is_replaced(pool_server, checkpoints_dir):
    """ComfyUI and the ranks keep the model until it is loaded again."""
    folder = checkpoints_dir / "upscale_models"
    prompts = [upscale_prompt("replaced", world, **WIDE) for world in (None, 2)]

    def upscaled():
        return [pool_server.sample(prompt) for prompt in prompts]

    shutil.copy(folder / "compact.safetensors", folder / "replaced.safetensors")
    stock, ours = upscaled()
    assert (ours == stock).all()
    shutil.copy(folder / "esrgan.safetensors", folder / "new")
    os.replace(folder / "new", folder / "replaced.safetensors")
    assert (upscaled()[1] == stock).all()
    pool_server.free_first()
    other, ours = upscaled()
    assert other.shape != stock.shape
    assert (ours == other).all()


@pytest.mark.parametrize(("times", "tile"), [(1, 512), (2, 256), (4, 128), (6, None)])
def test_out_of_memory(pool_server, expected, faults, times, tile):
    """Once: room is made, and the call is tried again. Twice: ComfyUI's node halves the tiles; below 128 pixels the prompt ends."""
    pids = assert_right(pool_server, expected)
    faults.arm(1, "oom", module=1, times=times)
    prompt = upscale_prompt("compact", 2, **WIDE, again=True)
    if tile is None:
        pool_server.fails(prompt, "OutOfMemoryError: injected", "you ran out of memory on your GPU")  # ComfyUI's words
    else:
        stock = upscale_prompt("compact", **WIDE)
        stock["run"]["inputs"]["upscale_model"] = ["short", 0]
        stock["short"] = {"class_type": "TestShortOfMemory", "inputs": {"model": ["loader", 0], "tile": tile}}
        halved = pool_server.sample(stock)
        assert (tile == 512) == bool((halved == expected).all())
        assert (pool_server.sample(prompt) == halved).all()
    assert not faults.waiting
    assert assert_right(pool_server, expected) == pids


def test_out_of_memory_at_the_load(pool_server, expected, faults):
    """Smaller tiles would not help."""
    assert_right(pool_server, expected)
    pool_server.free_workers()
    faults.arm(1, "oom", "load")
    pool_server.fails(upscale_prompt("compact", 2, **WIDE, again=True), "OutOfMemoryError: injected")
    assert not faults.waiting
    assert_right(pool_server, expected)


@pytest.mark.parametrize("size", [SMALL | {"frames": 12}, LARGE])
def test_out_of_memory_while_blending(pool_server, expected, size):
    """ComfyUI's node begins anew, with tiles that the ranks have not computed. Some have the sizes of those that they have."""
    pids = assert_right(pool_server, expected)
    prompt = upscale_prompt("compact", 2, **size, again=True)
    prompt["failing"] = {"class_type": "TestBlendingFails", "inputs": {"model": ["loader", 0]}}
    prompt["run"]["inputs"]["upscale_model"] = ["failing", 0]
    pool_server.fails(prompt, "ComfyUI's process ran out of memory while it blended tiles")
    assert assert_right(pool_server, expected) == pids
