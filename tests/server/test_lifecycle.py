"""One pool serves prompt after prompt; failures end the prompt with a clear error and the next prompt is right."""

import os
import shutil
import signal
import time
from functools import partial

import psutil
import pytest
from support import families
from support.faults import SLACK, SOAK, Stopwatch
from support.graphs import family_prompt, flux_prompt, renamed, wan_prompt
from support.latents import assert_close
from support.node_graphs import assert_right
from support.processes import held, wait_gone
from support.server import ComfyServer

CP = {"world_size": 2}
# About 1,000 tokens: steps of a few tenths of a second here, so that faults hit a running call.
LONG = {"width": 512, "height": 512, "steps": 60}


@pytest.fixture(scope="module")
def expected(pool_server):
    return pool_server.sample(flux_prompt())


def test_many_prompts_use_the_same_workers_and_grow_nothing(pool_server, expected):
    pids = assert_right(pool_server, expected)
    assert len(pids) == 2
    everyone = [psutil.Process(pid) for pid in (pool_server.pid, *pids)]

    def measure():
        return [(each.num_fds(), each.num_threads()) for each in everyone], sum(held(each.pid) for each in everyone)

    for _ in range(3):
        assert_right(pool_server, expected)
    before, memory = measure()
    for _ in range(20 if SOAK else 7):
        assert_right(pool_server, expected)
    after, memory_after = measure()
    assert pool_server.worker_pids() == pids
    for (fds, threads), (fds_after, threads_after) in zip(before, after, strict=True):
        assert fds_after <= fds + 2
        assert threads_after <= threads + 1
    assert memory_after <= memory * 1.05


@pytest.mark.parametrize("kind", ["kill", pytest.param("error", marks=pytest.mark.soak)])
def test_a_comparison_that_fails_ends_no_prompt(kind, pool_server, expected, faults):
    """The second step is repeated on rank 0."""
    assert_right(pool_server, expected)
    assert pool_server.post("/context_parallel/measure")["status"]["speed"]["measuring"]
    faults.arm(0, "slow", at="call", seconds=0, times=2, then={"kind": kind, "at": "call"})
    assert_right(pool_server, expected)
    assert not faults.waiting
    status = pool_server.status()
    assert (status["speed"]["measuring"], status["speed"]["parts"]["obstacle"]) == (False, "failed")
    assert "a call was not compared with one device" in pool_server.log_text()


def test_idle_workers_do_not_spin(pool_server, expected):
    """A rank that polls uses a whole core. gloo's own threads wake up now and then: a percent or two of one."""
    workers = [psutil.Process(pid) for pid in assert_right(pool_server, expected)]
    seconds, shares = 2.0, []
    for _ in range(3):
        before = [sum(w.cpu_times()[:2]) for w in workers]
        time.sleep(seconds)
        shares.append(max(sum(w.cpu_times()[:2]) - b for w, b in zip(workers, before, strict=True)) / seconds)
    assert min(shares) <= 0.1


def test_changes_between_prompts_give_right_results(pool_server, expected):
    other = pool_server.sample(wan_prompt())
    lora = pool_server.sample(flux_prompt(loras=["flux_lora"]))
    half = pool_server.sample(flux_prompt(loras=[("flux_lora", 0.5)]))
    for settings, reference, build in [
        ({}, expected, flux_prompt),
        ({"loras": ["flux_lora"]}, lora, flux_prompt),
        ({}, expected, flux_prompt),
        ({}, other, wan_prompt),
        ({"loras": [("flux_lora", 0.5)]}, half, flux_prompt),
        ({"loras": ["flux_lora"]}, lora, flux_prompt),
    ]:
        assert_close(pool_server.sample(build(cp=CP, **settings)), reference)
    three = pool_server.sample(flux_prompt(cp={"world_size": 3}))
    assert len(pool_server.worker_pids()) == 3
    assert_close(three, expected)
    assert len(assert_right(pool_server, expected)) == 2


@pytest.mark.bits("the same patches and shares of tokens")
def test_lora_before_and_after_apply_is_the_same(pool_server):
    outs = [pool_server.sample(flux_prompt(cp=CP, loras=[("flux_lora", 0.5)], apply_after_lora=after)) for after in (True, False)]
    assert (outs[0] == outs[1]).all()


def test_two_models_stay_mirrored(pool_server):
    settings = {"node": "KSamplerAdvanced", "low_ckpt": "wan_t2v_low", "steps": 4, "cfg": 4.0}
    reference, loads = pool_server.sample(wan_prompt(**settings)), []
    for _ in range(2):
        assert_close(pool_server.sample(wan_prompt(cp=CP, **settings)), reference)
        loads.append(pool_server.log_text().count("[rank 1] loading"))
    assert loads[0] == loads[1]


def test_two_strengths_in_one_graph(pool_server):
    """Two branches share the file but not the weights: the workers must not mix them up."""
    first, second = flux_prompt(cp=CP, loras=[("flux_lora", 0.5)]), flux_prompt(cp=CP, loras=["flux_lora"])
    result = pool_server.run(renamed(first, "a_") | renamed(second, "b_")).check()
    for prefix, strength in (("a_", 0.5), ("b_", 1.0)):
        reference = pool_server.sample(flux_prompt(loras=[("flux_lora", strength)]))
        assert_close(pool_server.latent(result, f"{prefix}save"), reference)


def test_the_same_model_with_and_without_context_parallelism_in_one_graph(pool_server, expected):
    prompt, plain = flux_prompt(cp=CP, nonce=0), renamed(flux_prompt(nonce=0), "plain_")
    plain["plain_sampler"]["inputs"]["model"] = ["loader", 0]
    result = pool_server.run(prompt | plain).check()
    assert_close(pool_server.latent(result, "plain_save"), expected, 1e-5)  # weights of the mapped file are aligned differently
    assert_close(pool_server.latent(result, "save"), expected)


def test_the_workers_drop_a_model_that_is_loaded_without_them(pool_server, expected):
    """They share devices with ComfyUI's process, which would not get that memory back."""
    pids = assert_right(pool_server, expected)
    assert "flux.safetensors" in pool_server.status()["models"]
    pool_server.run(flux_prompt(seed=77)).check()
    assert "flux.safetensors" not in pool_server.status()["models"]
    assert assert_right(pool_server, expected) == pids


def test_free_unloads_the_workers_and_the_next_prompt_reloads(pool_server, expected):
    pids, loads = assert_right(pool_server, expected), pool_server.log_text().count("[rank 0] loading")
    pool_server.free_workers()
    assert assert_right(pool_server, expected) == pids
    assert pool_server.log_text().count("[rank 0] loading") == loads + 1


def test_progress_and_previews_arrive_while_workers_compute(pool_server):
    started = time.monotonic()
    prompt_id = pool_server.queue(flux_prompt(cp=CP, width=256, height=256, steps=12))
    result = pool_server.wait(prompt_id, 120).check()
    progress = [e for e in pool_server.events if e.type == "progress" and e.data["prompt_id"] == prompt_id]
    assert [e.data["value"] for e in progress] == sorted(e.data["value"] for e in progress)
    assert progress[-1].data["max"] == 12
    assert len(progress) >= 3
    assert len(pool_server.previews(started)) >= 3
    assert result.status == "success"


def wait_for_sampler(server, prompt_id, seconds):
    """Wait until the sampler of a prompt has worked for some seconds."""
    server.wait_event(lambda e: e.type == "executing" and e.data.get("node") == "sampler" and e.data["prompt_id"] == prompt_id)
    time.sleep(seconds)


# Settings of the graph; from which module on, and how many seconds, rank 1 is slow in every block; seconds of the sampler before
# Cancel, and until the prompt has ended; whether the workers stay.
CANCELS = {
    "between steps": (LONG, None, None, 2, True),
    # Five planned modules: the first step takes 1.5 s.
    "inside a slow step": ({"width": 80}, (1, 0.3), 0.6, 2, True),
    # Ranks leave at the second block that they enter: they get the time of three.
    "inside blocks of a second": ({"width": 80}, (1, 0.9), 1.3, 3, True),
    # Where one block takes far longer than those before it, the workers are restarted: the prompt ends in time all the same.
    "inside a step of many seconds": ({"width": 88}, (3, 8), 1, 2, False),
}


@pytest.mark.parametrize("when", [pytest.param(when, marks=pytest.mark.soak if "second" in when else ()) for when in CANCELS])
def test_cancel(pool_server, expected, faults, when):
    """All ranks leave the call at the same block, although one of them is late."""
    settings, slow, before, bound, stay = CANCELS[when]
    pids = assert_right(pool_server, expected)
    if slow:
        faults.arm(1, "slow", module=slow[0], seconds=slow[1])
    prompt_id = pool_server.queue(flux_prompt(cp=CP, **settings))
    if slow:
        wait_for_sampler(pool_server, prompt_id, before)
    else:
        pool_server.wait_for_step(prompt_id)
    watch = Stopwatch(f"28 Cancel {when}")
    pool_server.interrupt()
    result = pool_server.wait(prompt_id, 30)
    watch.within(bound, "the prompt ends")
    assert result.status == "interrupted"
    after = assert_right(pool_server, expected)
    assert len(after) == 2
    assert after == pids or not stay


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_worker_fails_the_prompt_and_the_next_one_is_right(pool_server, expected, rank):
    pids = assert_right(pool_server, expected)
    prompt_id = pool_server.queue(flux_prompt(cp=CP, **LONG))
    pool_server.wait_for_step(prompt_id)
    watch = Stopwatch(f"2 SIGKILL of rank {rank} of 2 in a call")
    os.kill(pids[rank], signal.SIGKILL)
    result = pool_server.wait(prompt_id, 30)
    watch.within(2, "the prompt has ended")
    assert result.status == "error"
    assert f"rank {rank} (pid {pids[rank]}) failed: SIGKILL" in result.error.exception_message
    assert wait_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 2) == []
    assert not set(pids) & set(assert_right(pool_server, expected))


@pytest.mark.parametrize(("rank", "module"), [(1, 1), *([(1, 3), (0, 4)] if SOAK else [])])
def test_out_of_memory_on_one_rank(pool_server, expected, faults, rank, module):
    """Room is made, and the call is tried again."""
    assert_right(pool_server, expected)
    faults.arm(rank, "oom", module=module)
    watch = Stopwatch(f"29 out of memory on rank {rank} of 2, module {module}")
    assert_right(pool_server, expected)
    watch.within(5, "the prompt has ended, from its start")
    assert not faults.waiting
    assert f"rank {rank} ran out of memory; making room" in pool_server.log_text()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_out_of_memory_twice(pool_server, expected, faults, rank):
    """ComfyUI sees that it was memory, and unloads its models."""
    assert_right(pool_server, expected)
    faults.arm(rank, "oom", module=2, times=2)
    watch = Stopwatch(f"29 out of memory on rank {rank} of 2, twice")
    words = (f"rank {rank} (pid ", "OutOfMemoryError: injected", f"rank {rank}: host ", "you ran out of memory on your GPU")
    error = pool_server.fails(flux_prompt(cp=CP), *words)  # the last is in ComfyUI's words
    watch.within(10, "the prompt has ended, from its start")
    assert "Connection closed" not in error.exception_message
    assert not faults.waiting
    assert_right(pool_server, expected)


@pytest.mark.parametrize("served", ["sd15"])
@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.soak)])
def test_out_of_memory_in_one_batch_group(served, world, pool_server, faults, family_checkpoints):
    """UNets share the batch only: the other groups are in a forward of their own."""
    entry = families.served()[served][1]
    expected = pool_server.sample(family_prompt(entry, cfg=4.0))
    prompt = partial(family_prompt, entry, cfg=4.0, cp={"world_size": world})
    faults.arm(1, "oom", module=3, times=2)
    pool_server.fails(prompt(), "OutOfMemoryError: injected")
    assert not faults.waiting
    assert_close(pool_server.sample(prompt(), timeout=60), expected)


@pytest.fixture(scope="module")
def own_models(checkpoints_dir, tmp_path_factory):
    """A folder of models that a test may change: one file, one behind a link, and a folder behind a link."""
    base = tmp_path_factory.mktemp("own")
    folder, elsewhere = base / "models" / "diffusion_models", base / "elsewhere"
    folder.mkdir(parents=True)
    elsewhere.mkdir()
    for name, target in (("flux", folder / "flux"), ("flux", elsewhere / "flux"), ("flux_h1", elsewhere / "flux_h1")):
        shutil.copyfile(checkpoints_dir / "diffusion_models" / f"{name}.safetensors", target.with_suffix(".safetensors"))
    (folder / "linked.safetensors").symlink_to(elsewhere / "flux.safetensors")
    (folder / "folder").symlink_to(elsewhere, target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def own_models_server(comfyui_path, own_models):
    with ComfyServer(comfyui_path, models=own_models.parent) as running:
        yield running


@pytest.mark.bits("the stock path twice")
def test_a_weight_that_a_node_changes_after_loading(own_models_server):
    """Ranks have it as ComfyUI has it now, and not as it is in the file."""
    server = own_models_server
    plain = server.sample(flux_prompt(cp=CP), timeout=120)
    changed = {"model_nodes": [("TestPatch", {"kind": "changed_weight"})]}
    stock = server.sample(flux_prompt(**changed), timeout=60)
    assert_close(server.sample(flux_prompt(cp=CP, **changed), timeout=60), stock)
    assert (server.sample(flux_prompt(**changed), timeout=60) == stock).all()
    assert (stock - plain).abs().max() > 1e-3
    server.free_first()
    assert_close(server.sample(flux_prompt(cp=CP), timeout=60), plain)


@pytest.mark.parametrize("ckpt", ["linked", "folder/flux_h1"])
def test_linked_model_files_and_folders(own_models_server, ckpt):
    """Models that lie on another disk, behind a link, are inside ComfyUI's model folders."""
    server = own_models_server
    reference = server.sample(flux_prompt(ckpt=ckpt))
    assert_close(server.sample(flux_prompt(ckpt=ckpt, cp=CP), timeout=120), reference)


def test_free_with_a_stopped_worker_does_not_end_the_queue(pool_server, expected):
    assert_right(pool_server, expected)
    os.kill(pool_server.worker_pids()[1], signal.SIGSTOP)
    pool_server.free_workers()
    assert_right(pool_server, expected)


def test_interrupt_signal_while_computing_ends_everything(own_models_server):
    """Ctrl-C: the server does not wait for the step, and starts nothing on its way out. Ends the server: the last test on it."""
    server = own_models_server
    server.run(flux_prompt(ckpt="linked", cp=CP), timeout=120).check()
    workers = server.workers()
    assert len(workers) == 2
    prompt_id = server.queue(flux_prompt(ckpt="linked", cp=CP, width=1024, height=1024, steps=20))
    wait_for_sampler(server, prompt_id, 1)
    process = psutil.Process(server.pid)
    process.send_signal(signal.SIGINT)
    if wait_gone([process], 10):  # Python drops an interrupt that meets a finaliser; a user presses Ctrl-C again
        process.send_signal(signal.SIGINT)
    assert wait_gone([process, *workers], 10 * SLACK) == []
