"""Ranks that keep a part of a model each, on a real server: the same latents, by choice and by memory; faults as with whole ones.

Weights lie at other addresses than in the file, so CPU libraries that compute with several threads may add up in another order;
tests/ranks/weights/test_shared_weights.py compares bits.
"""

import re
import shutil
import time

import pytest
from support.faults import SLACK
from support.graphs import flux_prompt, renamed, wan_prompt
from support.latents import assert_close

CP = {"world_size": 2, "ulysses_degree": 2, "ring_degree": 1, "batch_degree": 1}
LORA, DEEP_LORA = {"loras": ["flux_lora"]}, {"loras": ["flux_deep_lora"]}
# Of 27 MB of weights in 25 blocks, with two of the largest at a time, every rank keeps 19 MB, or 6 with its part on the host.
DEEP, SHARED_FITS, NEITHER_FITS = {"ckpt": "flux_deep"}, 0.036, 0.024  # GB, with 16 MB for a call


@pytest.fixture(scope="module")
def whole(pool_server):
    graphs = {"plain": {}, "deep": DEEP, "lora": LORA, "deep lora": {**DEEP, **DEEP_LORA}}
    found = {name: pool_server.sample(flux_prompt(cp={**CP, "weights": "whole"}, **graph)) for name, graph in graphs.items()}
    for name in ("", "deep "):
        without = found[name.strip() or "plain"]
        assert (found[f"{name}lora"] - without).abs().max() > 0.1 * without.std()
    return found


def same(out, expected):
    assert_close(out, expected, 1e-5)


def assert_right(server, whole, weights="sharded", model="plain", **settings):
    out, _ = run(server, weights, **settings)
    same(out, whole[model])


def run(server, weights, *, memory=0.0, **settings):
    """The latent, and what the report says about weights."""
    cp = {**CP, "weights": weights, "memory_per_rank": memory}
    result = server.run(flux_prompt(cp=cp, node="CPSampler", **settings)).check()
    return server.latent(result), result.report["weights"]


def placement(server, ckpt="flux"):
    return server.status()["weights"][f"{ckpt}.safetensors"]


@pytest.mark.parametrize("weights", ["sharded", "offloaded"])
def test_latents_are_the_same(pool_server, whole, weights):
    """Bit by bit; with a LoRA, and without it again. Workers stay the same processes."""
    before = pool_server.worker_pids()
    for expected, settings in (("plain", {}), ("lora", LORA), ("plain", {})):
        assert_right(pool_server, whole, weights, expected, **settings)
    assert placement(pool_server).startswith(f"{weights}, as set")
    assert pool_server.worker_pids() == before


def test_files_of_one_name_in_different_folders(pool_server, checkpoints_dir):
    """Each has its own entry in the status, by the name that the loader has for it."""
    folder = checkpoints_dir / "diffusion_models" / "other"
    folder.mkdir()
    shutil.copy(folder.parent / "flux.safetensors", folder / "flux.safetensors")
    cp = {**CP, "weights": "sharded"}
    pool_server.run(flux_prompt(cp=cp, low_ckpt="other/flux", node="KSamplerAdvanced", steps=4)).check()
    status = pool_server.status()
    assert status["models"] == sorted(status["weights"]) == ["flux.safetensors", "other/flux.safetensors"]


def test_two_models_take_turns(pool_server):
    """High and low noise, each of them shared out."""
    settings = {"low_ckpt": "wan_t2v_low", "node": "KSamplerAdvanced", "steps": 4}
    outs = [pool_server.sample(wan_prompt(cp={**CP, "weights": weights}, **settings)) for weights in ("whole", "sharded")]
    same(*outs)


@pytest.mark.parametrize(("memory", "expected"), [(1.0, "whole"), (SHARED_FITS, "sharded"), (NEITHER_FITS, "offloaded")])
def test_memory_decides(pool_server, whole, memory, expected):
    out, report = run(pool_server, "auto", memory=memory, **DEEP)
    same(out, whole["deep"])
    assert report["placement"] == expected, report
    assert placement(pool_server, "flux_deep") == report["reason"]
    assert report["reason"].startswith(f"{expected}: ")
    assert report["device_bytes"] <= memory * 1e9 or expected == "offloaded"


def test_as_many_blocks_as_fit_are_whole(pool_server, whole):
    """The less memory, the more blocks are shared and sent, down to all of them. The same latents, with a LoRA too."""
    shared, sent = [], []
    for memory in (0.041, 0.039, 0.037):
        cp = {**CP, "weights": "auto", "memory_per_rank": memory}
        for expected, settings in (("deep", {}), ("deep lora", DEEP_LORA)):
            result = pool_server.run(flux_prompt(cp=cp, node="CPSampler", **DEEP, **settings)).check()
            same(pool_server.latent(result), whole[expected])
            weights = result.report["weights"]
            assert weights["placement"] == "sharded", weights
            assert weights["device_bytes"] <= memory * 1e9, weights
        shared.append(int(re.search(r"(\d+) of 26 blocks are shared|$", weights["reason"])[1] or 0))
        sent.append(result.report["communication"]["bytes"])
    assert 0 < shared[0] < shared[1] < shared[2] < 26
    assert sent[0] < sent[1] < sent[2]


def test_what_was_set_before_says_nothing(pool_server, whole):
    """Back at auto, the ranks keep the model whole; a limit is looked at although the model lies like that already."""
    run(pool_server, "sharded")
    out, report = run(pool_server, "auto")
    same(out, whole["plain"])
    assert report["placement"] == "whole"
    run(pool_server, "sharded")
    prompt = flux_prompt(cp={**CP, "weights": "sharded", "memory_per_rank": 1e-3})
    pool_server.fails(prompt, "Got sharded, with which each of 2 ranks needs")


def test_what_does_not_fit_runs_on_one_device_where_that_is_set(pool_server, whole):
    cp = {**CP, "weights": "whole", "memory_per_rank": 1e-3, "on_unsupported": "single device"}
    same(pool_server.sample(flux_prompt(cp=cp)), whole["plain"])


def test_a_larger_picture_loads_nothing_again(pool_server):
    def loads():
        return pool_server.log_text().count("flux.safetensors (")

    run(pool_server, "auto")
    before = loads()
    run(pool_server, "auto", width=128, height=128)
    run(pool_server, "auto")
    assert loads() == before


def test_what_does_not_fit_is_refused_by_name(pool_server):
    prompt = flux_prompt(cp={**CP, "weights": "whole", "memory_per_rank": SHARED_FITS}, **DEEP)
    pool_server.fails(prompt, "Got whole, with which each of 2 ranks needs", "Set it to auto")


def test_without_a_limit_cpu_ranks_keep_it_whole(pool_server, whole):
    assert_right(pool_server, whole, "auto")
    assert placement(pool_server).startswith("whole: ")
    assert "which CPU ranks share" in placement(pool_server)


@pytest.mark.parametrize("weights", [pytest.param("whole", marks=pytest.mark.soak), "sharded"])
def test_loading_says_how_far_it_is(pool_server, whole, faults, weights):
    """In the status, as text in the node, and in its progress bar, which then counts steps."""
    pool_server.free_workers()
    faults.arm(1, "slow", at="weights", seconds=0.1 if weights == "sharded" else 0.02)  # block by block, weight by weight
    since = time.monotonic()
    prompt = pool_server.queue(flux_prompt(cp={**CP, "weights": weights}, **DEEP))
    said, states = [], set()
    while prompt not in pool_server.get(f"/history/{prompt}"):
        status = pool_server.status()
        if status["activity"].endswith(" %"):
            said.append(status["activity"])
            assert status["loading"]["model"] == "flux_deep.safetensors"
            assert 100 * status["loading"]["part"] == pytest.approx(int(re.search(r"(\d+) %", said[-1])[1]), abs=1)
            states |= {status["state"], status["ranks"][1]["state"]}
        time.sleep(0.02)
    same(pool_server.latent(pool_server.wait(prompt).check()), whole["deep"])
    assert not faults.waiting
    assert states == {"loading"}
    parts = [int(re.fullmatch(r"loading flux_deep.safetensors on (?:2 ranks|rank 1)… (\d+) %", each)[1]) for each in said]
    parts = parts[parts.index(min(parts)) :]  # the quick rank may have begun alone
    assert parts == sorted(parts)
    assert len(set(parts)) > 3
    events = [e for e in pool_server.events if e.time >= since]
    assert any(e.type == "text" and e.data[0] == "sampler" and e.data[1].endswith(" %") for e in events)
    bar = [(e.data["value"], e.data["max"]) for e in events if e.type == "progress" and e.data["prompt_id"] == prompt]
    loading, steps = bar[:-2], bar[-2:]
    assert len(loading) > 2
    assert loading == [*sorted(loading[:-1]), (0, 100)]
    assert steps == [(1, 2), (2, 2)]


def test_cancel_while_a_model_loads(pool_server, whole, faults):
    """The prompt ends; workers that cannot leave a load start again with the next one."""
    pool_server.free_workers()
    faults.arm(1, "slow", at="weights", seconds=0.5)
    prompt = pool_server.queue(flux_prompt(cp={**CP, "weights": "sharded"}, **DEEP))
    pool_server.wait_status(lambda status: status["activity"].endswith(" %"), 60)
    began = time.monotonic()
    pool_server.interrupt(prompt)
    assert pool_server.wait(prompt).status == "interrupted"
    assert time.monotonic() - began <= 3 * SLACK
    assert_right(pool_server, whole, model="deep", **DEEP)


@pytest.mark.parametrize("way", ["SIGKILL of a rank", "Cancel"])
def test_the_end_of_a_prompt_in_the_middle(pool_server, whole, way):
    """Pieces of blocks are on their way when the ranks leave the call."""
    run(pool_server, "sharded")
    pids = pool_server.worker_pids()
    prompt = pool_server.queue(flux_prompt(cp={**CP, "weights": "sharded"}, width=768, height=768, steps=60))
    pool_server.end_in_the_middle(prompt, way)
    assert_right(pool_server, whole)
    assert (pool_server.worker_pids() == pids) == (way == "Cancel")


@pytest.mark.parametrize(("rank", "module"), [(1, 1), pytest.param(0, 4, marks=pytest.mark.soak)])
def test_out_of_memory_on_one_rank(pool_server, whole, faults, rank, module):
    """Pieces of the next block are on their way. Room is made, and the call is tried again."""
    run(pool_server, "sharded")
    faults.arm(rank, "oom", module=module)
    assert_right(pool_server, whole)
    assert not faults.waiting
    assert f"rank {rank} ran out of memory; making room" in pool_server.log_text()


@pytest.mark.parametrize("kind", ["error", pytest.param("exit", marks=pytest.mark.soak)])
def test_a_rank_that_fails(pool_server, whole, faults, kind):
    run(pool_server, "sharded")
    faults.arm(1, kind, module=3)
    pool_server.fails(flux_prompt(cp={**CP, "weights": "sharded"}), "rank 1 (pid ")
    assert not faults.waiting
    assert_right(pool_server, whole)


def test_free_lets_go_of_everything(pool_server, whole):
    run(pool_server, "sharded")
    pool_server.free_workers()
    assert_right(pool_server, whole)


def test_ranks_drop_a_model_that_comfyui_has_dropped(pool_server):
    """Also where no other one is loaded: the prompts that follow find theirs on the ranks, one of them for a larger call."""
    pool_server.run(flux_prompt(cp=CP) | renamed(flux_prompt(cp=CP, **DEEP), "other_")).check()
    assert pool_server.status()["models"] == ["flux.safetensors", "flux_deep.safetensors"]
    pool_server.run(flux_prompt(cp=CP, width=128)).check()
    assert pool_server.status()["models"] == ["flux.safetensors"]
