"""What travels for patches of other nodes and for ControlNets is rebuilt as it was, and names lead nowhere else."""

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def reports():
    return run_steps("families/patch_ranks.py", 1, by="name", preload=COMFY)


@pytest.mark.bits("the same products on one rank")
@pytest.mark.parametrize(
    "name", ["network", "patches", "left", "residuals", "listed", "attention read", "attention called", "layers"]
)
def test_rebuilt(name, reports):
    for what, value in reports[name].items():
        assert value is True or (isinstance(value, list) and value and all(value)), what
