"""Cases 27 and 33: ranks run nothing of another pack, and nothing of a pool listens where another machine could connect to."""

import ipaddress

import psutil
from support.faults import note
from support.graphs import flux_prompt

CP = {"world_size": 2}


def listeners(process):
    """Addresses of a process's listening sockets."""
    return [socket.laddr.ip for socket in process.net_connections("inet") if socket.status == psutil.CONN_LISTEN]


def test_nothing_listens_outside_of_loopback(fault_server):
    """The server and its ranks, with a model that was called."""
    fault_server.run(flux_prompt(cp=CP), timeout=120).check()
    fault_server.run(flux_prompt(cp=CP, loras=["flux_lora"]), timeout=120).check()
    server, ranks = listeners(psutil.Process(fault_server.pid)), [listeners(rank) for rank in fault_server.workers()]
    assert len(ranks) == 2
    outside = [ip for ip in (*server, *(ip for rank in ranks for ip in rank)) if not ipaddress.ip_address(ip).is_loopback]
    note("33 listeners of the server and its workers outside of loopback", "listeners seen", 0, len(outside))
    assert outside == []
    assert server  # ComfyUI's own: sockets are seen


def test_ranks_run_nothing_of_another_pack(fault_server, other_pack):
    fault_server.run(flux_prompt(cp=CP), timeout=120).check()
    assert len(fault_server.worker_pids()) == 2
    lines = (other_pack / "said").read_text().splitlines()
    note("27 start of the ranks", "runs of another pack's code on ranks", 0, len(lines) - 2)
    assert lines == [f"prestartup {fault_server.pid}", f"import {fault_server.pid}"]
