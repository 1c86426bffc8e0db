"""Every diffusers model class that has a sharding plan, with that plan: the model on ranks equals the model in one process.

Also of a model of which every rank keeps 1/N, and with PipeFusion as far as nothing is stale.
"""

import functools
import sys
from pathlib import Path

import pytest
from support.ranks import DIFFUSERS, run_ranks

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from diffusers_cases import BATCH, CASES, checks_on, turns  # noqa: E402

TOLERANCE = 1e-5
WORLDS = (2, 3, 4)
RUNS = [(case, world, mode) for world in WORLDS for case in CASES for mode in turns(case, world)]


@functools.cache
def ran(world):
    """Reports of all cases and checks on `world` ranks; the error if a rank failed, which is not tried again either."""
    try:
        reports = run_ranks("api/diffusers_ranks.py", world, preload=DIFFUSERS, prepare=[])
        return {r.get("check") or (r["case"], r["mode"]): r for r in reports}
    except AssertionError as error:
        return error


@pytest.fixture
def reports(request):
    result = ran(request.param)
    if isinstance(result, AssertionError):
        raise result
    return result


@pytest.mark.parametrize(
    ("case", "reports", "mode"), RUNS, indirect=["reports"], ids=[f"{world}-{mode}-{case.name}" for case, world, mode in RUNS]
)
def test_sharded_model_equals_stock_model(case, mode, reports):
    result = reports[case.name, mode]
    assert result.get("error") is None
    assert result["difference"] <= TOLERANCE
    assert result["collectives"] > (mode != BATCH) * 2  # in two blocks and at the end: it was sharded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("reports", WORLDS[:1], indirect=True)
def test_cases_would_show_a_missing_token_or_mask(case, reports):
    stock = reports[case.name, "stock"]
    assert stock["std"] > 1e-1
    assert stock["reach"] > 20 * TOLERANCE
    assert (stock["mask_matters"] or 0) > (1e-1 if case.mask else -1)


@pytest.mark.parametrize(
    ("check", "reports"),
    [(check, world) for world in WORLDS for check in checks_on(world)],
    indirect=["reports"],
)
def test_checks(check, reports):
    """What must hold besides: a function of diffusers_applying.py, diffusers_tokens.py or diffusers_checks.py each."""
    assert reports[check]["error"] is None, reports[check]["error"]


def test_every_example_of_the_document_gives_what_one_process_gives():
    examples = run_ranks("api/document_ranks.py", 4, preload=DIFFUSERS)
    assert len(examples) == 6
    assert {example["code"]: example["difference"] for example in examples if not example["difference"] <= TOLERANCE} == {}


@pytest.mark.bits("the same shares of tokens, with whole weights or parts")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_bits_and_the_weights_come_back(world):
    """Where every rank keeps 1/N: the same bits as with whole weights, in 1/N of the memory."""
    reports = run_ranks("api/shared_ranks.py", world, preload=DIFFUSERS)
    assert [report["model"] for report in reports] == ["flux", "wan", "sd3"]
    for report in reports:
        assert report["equal"] == {"first": True, "second": True, "restored": True}, report
        assert report["weights"], report
        assert report["gathers"] > 0
        assert report["held"] <= report["bound"], report


@pytest.fixture(scope="module")
def staged():
    """Reports by model."""
    return {report["model"]: report for report in run_ranks("api/pipefusion_ranks.py", 2, preload=DIFFUSERS, prepare=[])}


@pytest.mark.bits("a stage runs whole blocks on whole tokens")
@pytest.mark.parametrize("model", ["hunyuan dit", "flux", "sd3", "pixart", "wan t2v"])
def test_a_model_staged(staged, model):
    found = staged[model]
    assert found["exact"] == 0
    assert max(found["warm_up"]) <= TOLERANCE
    assert found["same_inputs"] <= TOLERANCE
    assert 0 < found["next_step"] < 0.2  # keys and values of later patches are of the step before
    assert found["other_text"] <= TOLERANCE
    assert found["next_run"] <= TOLERANCE
    assert found["with_names"] <= TOLERANCE
    assert found["removed"] == 0


def test_stages_of_several_ranks():
    reports = [each for each in run_ranks("api/pipefusion_ranks.py", 4, preload=DIFFUSERS, prepare=[]) if "together" in each]
    assert {report["degrees"].partition(":")[0] for report in reports} == {"{'ulysses_degree'", "{'ring_degree'", "{'batch_degree'"}
    for report in reports:
        assert max(report["exact 1"], report["next 1"], report["exact 2"]) <= TOLERANCE, report
        assert 0 < report["next 2"] < 0.2, report


def test_a_class_without_a_plan_for_stages_is_refused(staged):
    assert "has no plan for pipefusion_degree" in staged["refused"]["error"]
