"""PipeFusion of diffusers' models by the Python API: on every rank the result of one process, as far as nothing is stale."""

import pytest
from support.ranks import DIFFUSERS, run_ranks

TOLERANCE = 1e-5
MODELS = ("hunyuan dit", "flux", "sd3", "pixart", "wan t2v")


@pytest.fixture(scope="module")
def reports():
    return {report["model"]: report for report in run_ranks("api/pipefusion_ranks.py", 2, preload=DIFFUSERS, prepare=[])}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_in_stages(reports, model):
    found = reports[model]
    assert found["exact"] == 0
    assert max(found["warm_up"]) <= TOLERANCE
    assert found["same_inputs"] <= TOLERANCE
    assert 0 < found["next_step"] < 0.2  # keys and values of later patches are of the step before
    assert found["other_text"] <= TOLERANCE
    assert found["next_run"] <= TOLERANCE
    assert found["with_names"] <= TOLERANCE
    assert found["removed"] == 0


def test_a_class_without_a_plan_for_stages_is_refused(reports):
    assert "has no plan for pipefusion_degree" in reports["refused"]["error"]
