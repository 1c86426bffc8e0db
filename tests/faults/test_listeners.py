"""Cases 27 and 33: ranks run nothing of another pack, and nothing of a pool listens where another machine could connect to."""

import os
import socket

from support.faults import note
from support.graphs import flux_prompt
from support.processes import outside_listeners

CP = {"world_size": 2}


def test_a_listener_outside_of_loopback_is_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert outside_listeners([os.getpid()])


def test_nothing_listens_outside_of_loopback(fault_server):
    """The server and its ranks, with a model that was called."""
    fault_server.run(flux_prompt(cp=CP), timeout=120).check()
    fault_server.run(flux_prompt(cp=CP, loras=["flux_lora"]), timeout=120).check()
    ranks = fault_server.worker_pids()
    assert len(ranks) == 2
    outside = outside_listeners([fault_server.pid, *ranks])
    note("33 listeners of the server and its workers outside of loopback", "listeners seen", 0, len(outside))
    assert outside == []


def test_ranks_run_nothing_of_another_pack(fault_server, other_pack):
    fault_server.run(flux_prompt(cp=CP), timeout=120).check()
    assert len(fault_server.worker_pids()) == 2
    lines = (other_pack / "said").read_text().splitlines()
    note("27 start of the ranks", "runs of another pack's code on ranks", 0, len(lines) - 2)
    assert lines == [f"prestartup {fault_server.pid}", f"import {fault_server.pid}"]
