"""Torch Compile on a real server: the blocks are compiled on the ranks, and the latents are those of a graph without it."""

import time
from functools import partial

import pytest
from support import families
from support.graphs import family_prompt, wan_prompt
from support.latents import assert_close

CP = {"world_size": 2, "ulysses_degree": 2}
TOLERANCE = 1e-4  # of three steps, each of which adds to what comes before


def same(out, expected):
    assert_close(out, expected, TOLERANCE)


@pytest.fixture(scope="module")
def stock(pool_server):
    return pool_server.sample(wan_prompt())


def run(pool_server, **settings):
    """The latent, and what the report says about compiled blocks."""
    result = pool_server.run(wan_prompt(node="CPSampler", **settings), timeout=300).check()
    return pool_server.latent(result), result.report["compiled"]


BACKENDS = [
    pytest.param(("TestPatch", {"kind": "compile_aot"}), id="aot_eager"),
    pytest.param(("TorchCompileModel", {"backend": "inductor"}), id="inductor", marks=pytest.mark.soak),
]


def test_cancel_while_the_ranks_compile(pool_server, faults):
    """The status says that they compile. They do not leave it, and others start with the next prompt."""
    run(pool_server, cp=CP)
    faults.arm(1, "slow", "compile", seconds=60.0)
    prompt_id = pool_server.queue(wan_prompt(cp=CP, after_apply=[("TestPatch", {"kind": "compile_eager"})]))
    pool_server.wait_status(lambda status: "compiling blocks on" in status["activity"], 120)
    began = time.monotonic()
    pool_server.interrupt()
    assert pool_server.wait(prompt_id, 60).status == "interrupted"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("node", BACKENDS)
def test_a_node_in_front_of_the_sampler(node, pool_server, stock):
    """Compiled in the first step; once more for another length of the text, and never again."""
    out, first = run(pool_server, cp=CP, after_apply=[node])
    same(out, stock)
    assert first["kinds"] == {"WanAttentionBlock": 2}
    assert (first["left"], first["breaks"]) == ({}, 0)
    pids = pool_server.worker_pids()
    for tokens in (13, 11):
        out, later = run(pool_server, tokens=tokens, cp=CP, after_apply=[node])
        same(out, pool_server.sample(wan_prompt(tokens=tokens)))
        assert later == {**first, "graphs": 2 * first["graphs"]}
    assert pool_server.worker_pids() == pids


def test_compiling_does_not_count_as_a_step(pool_server, faults, stock):
    """It takes twice as long as `step_timeout` on one of the ranks, which hold the model already."""
    run(pool_server, cp=CP)
    pids = pool_server.worker_pids()
    faults.arm(1, "slow", "compile", seconds=4.0)
    out, compiled = run(pool_server, cp={**CP, "step_timeout": 2.0}, after_apply=[("TestPatch", {"kind": "compile_eager"})])
    assert faults.waiting == []
    same(out, stock)
    assert compiled["kinds"] == {"WanAttentionBlock": 2}
    assert pool_server.worker_pids() == pids


def test_a_node_that_names_blocks_and_a_graph_without_it(pool_server, stock):
    """In front of Apply Context Parallel; the same workers compute without what was compiled in the next prompt."""
    out, compiled = run(pool_server, cp=CP, model_nodes=[("TestPatch", {"kind": "compile_eager"})])
    same(out, stock)
    assert compiled["kinds"] == {"WanAttentionBlock": 2}
    pids = pool_server.worker_pids()
    out, compiled = run(pool_server, cp=CP)
    same(out, stock)
    assert compiled["kinds"] == {}
    assert pool_server.worker_pids() == pids


@pytest.mark.soak
@pytest.mark.parametrize("served", ["sdxl"])
def test_a_unet(served, pool_server, family_checkpoints):
    """What is in its lists of blocks is compiled; its calls share the batch."""
    graph = partial(family_prompt, families.served()[served][1], cfg=3.0)
    expected = pool_server.sample(graph())
    prompt = graph(node="CPSampler", cp={"world_size": 2}, after_apply=[("TestPatch", {"kind": "compile_eager"})])
    result = pool_server.run(prompt, timeout=120).check()
    same(pool_server.latent(result), expected)
    report = result.report
    assert report["degrees"]["batch"] == 2
    assert set(report["compiled"]["kinds"]) == {"ResBlock", "SpatialTransformer", "Downsample", "Upsample"}
    assert report["compiled"]["left"] == {}


@pytest.mark.soak
@pytest.mark.bits("one process; the backend runs the same kernels")
def test_one_device_with_torch_compile_gives_the_stock_result(pool_server):
    """Another node makes the graph run on one device, where ComfyUI's own wrapper compiles."""
    override = [("TestPatch", {"kind": "attention_override"})]
    nodes = {"after_apply": [("TestPatch", {"kind": "compile_eager"}), *override]}
    expected = pool_server.sample(wan_prompt(after_apply=override), timeout=120)
    out = pool_server.sample(wan_prompt(cp={**CP, "on_unsupported": "single device"}, **nodes), timeout=120)
    assert (out == expected).all()


@pytest.mark.parametrize("patches", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_blocks_of_stages_are_compiled(pool_server, patches):
    """The second step is in patches. The last test: what ranks have compiled is not compiled again, with other weights either."""
    stages = {"cp": {"world_size": 2}, "pipefusion": {"stages": 2, "patches": patches, "warmup_calls": 1}}
    out, compiled = run(pool_server, after_apply=[("TestPatch", {"kind": "compile_eager"})], **stages)
    same(out, pool_server.sample(wan_prompt(**stages)))
    assert compiled["kinds"] == {"WanAttentionBlock": 2}
    assert (compiled["left"], compiled["breaks"]) == ({}, 0)
