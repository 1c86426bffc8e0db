"""Two network namespaces are two computers here: `make machines` makes them, and runs these tests in the first. In the other one is
a computer that ssh reaches by the name pc2."""

import os
import socket
import subprocess
from functools import partial
from pathlib import Path
from threading import Thread

import psutil
import pytest
from support import checkpoints, preloaded
from support.faults import Faults, wait_for
from support.graphs import flux_prompt
from support.server import ComfyServer
from support.sshd import PORT, Host

BETWEEN = "CP_TEST_MACHINES"
"""Environment variable with the name of the other namespace."""
THERE = os.environ.get(BETWEEN, "")
WIDE = "flux_wide"  # a model with heads of 128 whose products take the time
TWO, FOUR = "cpu,pc2/cpu", "cpu,cpu,pc2/cpu,pc2/cpu"

collect_ignore_glob = [] if THERE else ["test_*.py"]


class Two:
    """The server, and the computer that ssh reaches."""

    def __init__(self, server: ComfyServer, host: Host, faults: Faults) -> None:
        self.server, self.host, self.faults = server, host, faults

    def prompt(self, devices=TWO, cfg=1.0, **cp):
        return partial(flux_prompt, cfg=cfg, cp={"devices": devices, "ranks_per_call": "all", **cp})

    def run(self, steps=2, devices=TWO, **settings):
        return self.server.run(flux_prompt(cp={"devices": devices, "ranks_per_call": "all"}, steps=steps, **settings), timeout=120)

    def ranks_there(self):
        return [process for process in self.host.processes if "rank_program.py" in " ".join(process.cmdline())]

    def ssh(self):
        """The processes of ssh here, by the rank."""
        return [each for each in psutil.Process(self.server.pid).children() if each.name() == "ssh"]

    def sent(self):
        """Bytes that have left this computer."""
        return int(Path("/sys/class/net/va/statistics/tx_bytes").read_text())

    def restart(self):
        """Ask for it. The answer comes with the new workers, which measure the link."""
        Thread(target=self.server.answer, args=("/context_parallel/restart", "POST")).start()


@pytest.fixture(scope="session")
def two(comfyui_path, checkpoints_dir, family_errors, tmp_path_factory):
    preloaded.write_models("support.vaes", checkpoints_dir)
    checkpoints.write_flux(WIDE, checkpoints_dir, hidden=1024, double_blocks=2, single_blocks=4)
    faults, prefix = Faults(tmp_path_factory.mktemp("faults")), ("ip", "netns", "exec", THERE)
    host = Host(tmp_path_factory.mktemp("host"), "pc2", "10.77.0.2", Path(comfyui_path), checkpoints_dir, faults, prefix)
    env = {"OMP_NUM_THREADS": "1", **host.environment, **faults.environment}
    args = ["--use-pytorch-cross-attention"]
    with ComfyServer(comfyui_path, models=checkpoints_dir, args=args, env=env, forked=False) as server:
        try:
            yield Two(server, host, faults)
        finally:
            host.close()


@pytest.fixture
def expected(two):
    return two.server.sample_once(flux_prompt())


def cable(up):
    """Plug the cable in, or pull it. Plugged in, the other computer is reached when this returns: its address is looked up anew."""
    subprocess.run(["ip", "netns", "exec", THERE, "ip", "link", "set", "vb", "up" if up else "down"], check=True)
    if up:
        wait_for(reached, 30)


def reached():
    try:
        socket.create_connection(("10.77.0.2", PORT), timeout=1).close()
    except OSError:
        return False
    return True
