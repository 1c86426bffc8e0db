"""Stages of a model on a real server: exact ones give the same latents, patches nearly the same, through whatever happens."""

import pytest
from support import families
from support.graphs import family_prompt, flux_prompt, wan_prompt
from support.latents import assert_close

CP, MANY = {"world_size": 2}, {"world_size": 8}
STEPS, MOST = 20, 0.02  # largest error of such a run, in standard deviations of the latent
FEW, MOST_OF_FEW = 6, 0.06


def patched(patches=4, warmup_calls=1):
    return {"cp": CP, "pipefusion": {"stages": 2, "patches": patches, "warmup_calls": warmup_calls}}


@pytest.fixture(scope="module")
def exact(pool_server):
    """Graphs, and latents of one device."""
    other = {"width": 48, "conditioning": {"seed": 7}}
    graphs = {"long": {"steps": STEPS}, "plain": {}, "other": other, "lora": {"loras": ["flux_lora"]}}
    made = {name: {"steps": FEW, **graph} for name, graph in graphs.items()}
    return {name: (graph, pool_server.sample(flux_prompt(**graph))) for name, graph in made.items()}


def error(out, expected):
    return ((out - expected).pow(2).mean().sqrt() / expected.std()).item()


def assert_near(server, exact, name="plain", **settings):
    """The latent of a prompt in patches is near the exact one, and not the same. Returns the report."""
    graph, expected = exact[name]
    result = server.run(flux_prompt(**patched(**settings), node="CPSampler", **graph)).check()
    assert 0 < error(server.latent(result), expected) <= (MOST if name == "long" else MOST_OF_FEW)
    return result.report


@pytest.mark.parametrize("prompt", [flux_prompt, wan_prompt])
def test_exact_stages_give_the_same_latents(pool_server, prompt):
    """With CFG, whose halves follow each other."""
    expected = pool_server.sample(prompt(cfg=4.0))
    result = pool_server.run(prompt(cp={**CP, "weights": "staged"}, node="CPSampler", cfg=4.0)).check()
    assert_close(pool_server.latent(result), expected, 1e-5)
    assert result.report["weights"]["reason"].startswith("staged, as set")
    assert result.report["degrees"] == {"ulysses": 1, "ring": 1, "batch": 1, "stages": 2, "patches": 1}
    assert result.report["pipeline"]["bubble"] == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize("served", ["ace_step"])
@pytest.mark.usefixtures("family_checkpoints")
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_stages_whose_planned_modules_are_inside_of_their_blocks(served, cfg, pool_server):
    """A stage enters other ones than the next: they are no places to leave a call together."""
    _, entry, _ = families.served()[served]
    expected = pool_server.sample(family_prompt(entry, cfg=cfg, steps=2))
    for _ in range(3):
        assert_close(pool_server.sample(family_prompt(entry, cfg=cfg, steps=2, cp={**CP, "weights": "staged"})), expected)


def test_few_steps_are_noted(pool_server, exact):
    assert_near(pool_server, exact)
    assert f"1 of {FEW} steps are exact, so patches gain little" in pool_server.log_text()


def test_what_the_report_says(pool_server, exact):
    report = assert_near(pool_server, exact, "long", patches=8, warmup_calls=2)
    pipeline = report["pipeline"]
    assert (pipeline["exact_calls"], pipeline["approximate_calls"]) == (2, STEPS - 2)
    assert report["speed"].endswith(f" ({STEPS - 2} of {STEPS} calls approximate)")
    assert pool_server.status()["speed"]["words"] == report["speed"]
    assert (pipeline["stages"], pipeline["patches"], pipeline["stage_of_rank"]) == (2, 8, [1, 0])
    assert pipeline["bubble"] == pytest.approx(1 / 9, abs=1e-4)
    assert pipeline["bytes_sent"][0] == 0 < pipeline["bytes_sent"][1]
    assert min(pipeline["kept_bytes"]) > 0
    assert report["degrees"]["patches"] == 8


def test_measure_says_how_far_a_call_was_from_the_exact_one(pool_server, exact):
    pool_server.post("/context_parallel/measure")
    pipeline = assert_near(pool_server, exact, warmup_calls=2)["pipeline"]
    assert 0 < pipeline["difference_from_exact"] < 1
    speed = pool_server.status()["speed"]
    assert (speed["measuring"], speed["parts"]["obstacle"]) == (False, "staged")


def test_another_prompt_size_and_lora_in_between(pool_server, exact):
    """Nothing is kept from one prompt to the next."""
    pids = None
    for name in ("plain", "other", "lora", "plain"):
        assert_near(pool_server, exact, name)
        pids = pids or pool_server.worker_pids()
    pool_server.free_workers()
    assert_near(pool_server, exact)
    assert pool_server.worker_pids() == pids


@pytest.mark.parametrize("way", ["SIGKILL of a rank", "Cancel"])
def test_the_end_of_a_prompt_in_the_middle(pool_server, exact, way):
    """Patches are on their way when the ranks leave the call."""
    pids = pool_server.worker_pids()
    prompt = pool_server.queue(flux_prompt(**patched(8), width=512, height=512, steps=60))
    pool_server.end_in_the_middle(prompt, way)
    assert_near(pool_server, exact)
    assert (pool_server.worker_pids() == pids) == (way == "Cancel")


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank(pool_server, exact, faults, rank):
    """Room is made, and the call is tried again."""
    faults.arm(rank, "oom", module=4)
    assert_near(pool_server, exact)
    assert not faults.waiting


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        (CP, {"stages": 3}, "Got 3; allowed: a number from 2 that divides the 2 ranks"),
        ({**CP, "ulysses_degree": 2}, {}, "Got 2; allowed: 0 or 1 where the model is staged"),
        (MANY, {"stages": 8}, "Set stages of CP PipeFusion to at most"),
        ({**MANY, "weights": "staged"}, None, "Flux cannot be divided into 8 stages: this model has"),
        ({**MANY, "weights": "staged"}, None, "Set “number of GPUs” of CP Config to at most"),
    ],
)
def test_refused(pool_server, config, inputs, words):
    """Before a rank starts."""
    pids = pool_server.worker_pids()
    patches = {} if inputs is None else {"pipefusion": {"stages": 2, "patches": 4, "warmup_calls": 1, **inputs}}
    pool_server.fails(flux_prompt(cp=config, **patches), words)
    assert pool_server.worker_pids() == pids
