"""What an installed plan keeps from call to call, and for how long."""

import gc
import weakref

import pytest
import torch
from torch import nn

from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.mesh import SequenceMesh
from cp_runtime.engine.plan import ShardingPlan
from cp_runtime.engine.profiling import CallTraces
from cp_runtime.engine.state import CallState
from cp_runtime.errors import ConfigError, PlanError
from cp_runtime.families.hidream_o1 import HIDREAM_O1

REFERENCES = HIDREAM_O1.modules[""]


class Model(nn.Module):
    def forward(self, x, **kwargs):
        return kwargs["ref_pixel_values"]


def installed_plan():
    return InstalledPlan(Model(), ShardingPlan(modules={"": REFERENCES}, outputs={}))


def run(installed, pixels):
    with installed.call(SequenceMesh(None), lambda shape: pytest.fail("no attention is shared")):
        return installed.forward(installed.model.forward, torch.zeros(1), ref_pixel_values=pixels)


def test_equal_reference_images_are_the_same_object_in_every_call_of_a_model():
    one, other = installed_plan(), installed_plan()
    first = run(one, torch.ones(3))
    assert run(one, torch.ones(3)) is first
    assert run(one, torch.zeros(3)) is not first
    assert run(other, torch.ones(3)) is not first


@pytest.mark.parametrize("how", ["removed", "dropped with its model"])
def test_reference_images_go_with_the_plan(how):
    installed = installed_plan()
    image = weakref.ref(run(installed, torch.ones(3)))
    gc.collect()
    assert image() is not None
    if how == "removed":
        installed.remove()
    else:
        del installed
        gc.collect()
    assert image() is None


def test_calls_of_the_same_lengths_share_their_layouts():
    first, second = CallState(0, 2), CallState(1, 2)
    for state in (first, second):
        state.define("img", 9)
    assert first.layout(("img",)) is second.layout(("img",))


def test_one_call_at_a_time():
    installed = installed_plan()
    with (
        installed.call(SequenceMesh(None), lambda shape: None),
        pytest.raises(PlanError, match="running already"),
        installed.call(SequenceMesh(None), lambda shape: None),
    ):
        pass
    assert installed.current is None


def test_a_folder_for_traces_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"CP_PROFILE: got .*file.*; allowed: a folder"):
        CallTraces(str(tmp_path / "file"), 0)
