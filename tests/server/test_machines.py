"""Another machine joins the shared server, over loopback: `make machines` has the rest, between network namespaces."""

import contextlib
import re
import shutil
import signal

import psutil
import pytest
from support import stand_in
from support.evil import Stranger
from support.faults import Stopwatch, wait_for
from support.graphs import flux_prompt
from support.joined import Joined, joined
from support.server import free_port

from cp_runtime.machines.facts import facts_of
from cp_runtime.machines.wire import Code

pytestmark = pytest.mark.skipif(stand_in.wanted() is not None, reason="join.py sees no fake devices")
BOTH = {"devices": "cpu,pc2/cpu"}


def machines(server):
    return server.get("/context_parallel/machines")


def quiet(server):
    found = machines(server)
    return (found["listens"], found["machines"]) == (False, [])


def state(server):
    found = machines(server)["machines"]
    return found[0]["state"] if found else ""


def listeners(server):
    return {
        connection.laddr.ip
        for one in family(server.pid)
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip != "127.0.0.1"
    }


def inside(server):
    """What of other machines the server's process has: (threads, modules)."""
    pattern = r"\.machines\.(relay|joining|join)$|^torch\.distributed\.elastic"
    result = server.run({"inside": {"class_type": "TestInside", "inputs": {"modules": pattern}}}).check()
    threads, modules = result.outputs["inside"]["text"]
    return [name for name in threads if re.match("context-parallel-(machine|bridge|beats|store|meeting)", name)], modules


def family(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


def test_a_machine_joins_computes_dies_and_is_sent_away(server, tmp_path, checkpoints_dir):
    """In one go, as each step needs the one before."""
    reference = server.latent(server.run(flux_prompt(cp={"world_size": 1}), timeout=60).check())
    assert quiet(server)
    assert listeners(server) == set()
    assert inside(server) == ([], [])
    answer = server.post("/context_parallel/machines", {"add": f"127.0.0.2:{free_port()}"})
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    # Copies: a file has another path and another inode there.
    shutil.copytree(checkpoints_dir / "diffusion_models", base / "models" / "diffusion_models")
    options = ("--base-directory", str(base))
    marker, pids = tmp_path / "marker", [server.pid]
    with (
        Stranger(lambda: [process for pid in pids for process in family(pid)], marker, [server.port]) as stranger,
        joined(answer["code"], tmp_path / "log", options=options, cwd=server.comfyui_path) as other,
    ):
        pids.append(other.process.pid)
        watch = Stopwatch("50 another machine joins")
        wait_for(lambda: state(server) == "ready", 15)
        watch.within(15, "join to ready")
        assert listeners(server) == {"127.0.0.2"}
        result = server.run(flux_prompt(cp=BOTH), timeout=90).check()
        assert (server.latent(result) - reference).abs().max() < 1e-4
        ranks = server.status()["ranks"]
        assert [rank["device"] for rank in ranks] == ["cpu", "pc2/cpu"]
        assert ranks[1]["pid"] in [process.pid for process in other.processes]

        third = Joined(Code.parse(answer["code"]), "pc3", facts=facts_of(server.comfyui_path, "cpu"))  # nobody notices
        again = server.run(flux_prompt(cp=BOTH, seed=2), timeout=60).check()
        assert [rank["pid"] for rank in server.status()["ranks"]] == [rank["pid"] for rank in ranks]
        server.post("/context_parallel/machines", {"remove": "pc3"})
        third.close()

        other.signal(signal.SIGSTOP)  # as when it sleeps: nobody says goodbye
        watch = Stopwatch("51 another machine sleeps")
        server.fails(flux_prompt(cp=BOTH), "the computer pc2 (127.0.0.1) gave no sign of life")
        watch.within(10, "sleep to error")
        assert state(server) == "lost"
        again = server.run(flux_prompt(cp={}), timeout=60).check()  # on what is left
        assert (server.latent(again) - reference).abs().max() < 1e-4
    # A stranger without the code was there all the time, at the listener, at those of the meeting, and at gloo's.
    assert len(stranger.attacked) >= 4
    assert stranger.replaced == []
    assert not marker.exists()
    server.post("/context_parallel/machines", {"remove": "pc2"})
    assert quiet(server)
    wait_for(lambda: inside(server) == ([], []), 3)
    assert listeners(server) == set()
