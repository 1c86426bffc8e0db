"""Case 74: what a ControlNet has changed in the model for the time of a run is undone when the run fails by an error of ours."""

from collections.abc import Callable

import pytest
from support.faults import Faults
from support.graphs import flux_prompt
from support.latents import assert_close, differ
from support.modes import by_turns
from support.server import ComfyServer

CP = {"world_size": 2}
CONTROL = {"changes_model": True}


def refused(server: ComfyServer, faults: Faults) -> None:
    server.fails(flux_prompt(cp=CP, control=CONTROL, model_nodes=[("TestPatch", {"kind": "layer_alone"})]), "past the forward")


def rank_fails(server: ComfyServer, faults: Faults) -> None:
    faults.arm(1, "error", module=3)
    server.fails(flux_prompt(cp=CP, control=CONTROL), "injected")


def rank_dies(server: ComfyServer, faults: Faults) -> None:
    faults.arm(1, "exit", module=3)
    server.fails(flux_prompt(cp=CP, control=CONTROL), "ProcessExit")


def memory_runs_out(server: ComfyServer, faults: Faults) -> None:
    faults.arm(1, "oom", module=3, times=4)
    server.fails(flux_prompt(cp=CP, control=CONTROL), "memory")


def cancelled(server: ComfyServer, faults: Faults) -> None:
    server.end_in_the_middle(server.queue(flux_prompt(cp=CP, control=CONTROL, steps=2000)), "Cancel")


ENDS: dict[str, Callable[[ComfyServer, Faults], None]] = {
    function.__name__: function for function in (refused, rank_fails, rank_dies, memory_runs_out, cancelled)
}


@pytest.mark.parametrize("end", by_turns(ENDS, 2))
def test_the_stock_picture_afterwards(end, fault_server, expected, faults):
    with_control = fault_server.sample(flux_prompt(control={**CONTROL, "strength": 0.0}))
    assert differ(with_control, expected)  # it changes the model, and takes that back
    assert_close(fault_server.sample(flux_prompt()), expected)
    ENDS[end](fault_server, faults)
    assert_close(fault_server.sample(flux_prompt()), expected)
