"""Cases 23 to 25: other instances, other programs' settings, a bare network."""

import contextlib
import os
import socket
import sys
import warnings
from pathlib import Path

import psutil
import pytest
from faults.owner import Owner, namespaces
from support.faults import SOAK, note

ROUNDS = 20 if SOAK else 1


# --- 23 ---------------------------------------------------------------------------------------------------------------


def shared_files(pid):
    """The files without a name that a rank shares with its controller and, but for one, with the other ranks."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:context-parallel" in os.readlink(fd):
                found.add(fd.stat().st_ino)
    assert len(found) >= 4  # store, request, response, board
    return found


def test_two_instances_start_two_pools_each(tmp_path):
    """All four at the same time, over the same folder for temporary files."""
    case = "23 two instances start two pools each"
    collisions = 0
    with Owner(tmp_path) as first, Owner(tmp_path) as second:
        for number in range(ROUNDS):
            asked = [(owner, owner.send("start", pool=pool, thread=True)) for pool in "ab" for owner in (first, second)]
            pids = [pid for owner, request in asked for pid in owner.answer(request)["pids"]]
            assert len(set(pids)) == 8
            shared = [file for rank_0 in pids[::2] for file in shared_files(rank_0)]
            collisions += len(shared) - len(set(shared))
            calls = [
                (owner, owner.send("echo", pool=pool, nbytes=1 << 20, value=10 * number + 2 * i + j, thread=True))
                for i, pool in enumerate("ab")
                for j, owner in enumerate((first, second))
            ]
            assert all(owner.answer(request)["same"] for owner, request in calls)
            for owner in (first, second):
                for pool in "ab":
                    owner.ask("close", pool=pool)
    note(case, f"collisions in {ROUNDS} rounds", 0, collisions)
    assert collisions == 0
    assert list(tmp_path.iterdir()) == []


# --- 24 ---------------------------------------------------------------------------------------------------------------

FOREIGN = {
    "MASTER_ADDR": "192.0.2.1",  # an address for documentation: nothing answers there
    "MASTER_PORT": "29500",
    "RANK": "7",
    "LOCAL_RANK": "7",
    "WORLD_SIZE": "64",
    "LOCAL_WORLD_SIZE": "64",
    "GROUP_RANK": "7",
    "ROLE_RANK": "7",
    "TORCHELASTIC_RUN_ID": "elsewhere",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_what_another_launcher_left_behind(tmp_path):
    """The default port is taken, the variables speak of another job, and gloo is told to use an interface that is not there."""
    wrong = {**FOREIGN, "GLOO_SOCKET_IFNAME": "nowhere0"}
    with contextlib.ExitStack() as stack:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            with contextlib.suppress(OSError):  # taken already, or no IPv6
                taken = stack.enter_context(socket.socket(family))
                taken.bind((address, 29500))
                taken.listen()
        with pytest.raises(OSError), socket.socket() as probe:  # noqa: PT011
            probe.bind(("127.0.0.1", 29500))
        owner = stack.enter_context(Owner(tmp_path, wrong, forked=False))
        before = owner.ask("environment")["environment"]
        assert before.items() >= wrong.items()
        pids = owner.ask("start", pool="a")["pids"]
        assert owner.ask("echo", pool="a")["same"]
        for pid in pids:
            environment = psutil.Process(pid).environ()
            assert not set(FOREIGN) & set(environment)
            assert environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert owner.ask("environment")["environment"] == before


# --- 25 ---------------------------------------------------------------------------------------------------------------

# Runs another command on a host whose name nothing resolves, with loopback only and without IPv6.
BARE_HOST = """
import fcntl, os, pathlib, socket, struct, subprocess, sys
socket.sethostname("nobody-knows-this-host")
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
for place in ("all", "default", "lo"):
    pathlib.Path(f"/proc/sys/net/ipv6/conf/{place}/disable_ipv6").write_text("1")
order = pathlib.Path(sys.argv[1])
order.write_text("hosts: files\\n")  # and not a plugin that knows the host's own name
subprocess.run(["mount", "--bind", order, "/etc/nsswitch.conf"], check=True)
os.execv(sys.argv[2], sys.argv[2:])
"""

# The same as far as Python code can see, for kernels that let nobody make namespaces.
BARE_PYTHON = """
import socket, sys
def fail(*args, **kwargs):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
socket.getaddrinfo = socket.gethostbyname = socket.gethostbyname_ex = socket.gethostbyaddr = fail
socket.has_ipv6 = False
class Socket(socket.socket):
    def __init__(self, family=socket.AF_INET, *args, **kwargs):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        super().__init__(family, *args, **kwargs)
socket.socket = Socket
"""


def bare_host(folder):
    """Arguments for `Owner`: in namespaces of its own where the kernel allows that."""
    command = namespaces("--uts", "--net", "--mount", sys.executable, "-c", BARE_HOST, str(folder / "order"))
    if command is not None:
        return {"wrapper": command}
    warnings.warn("no right to make namespaces: only Python's own look-ups and sockets are cut off", stacklevel=2)
    (folder / "sitecustomize.py").write_text(BARE_PYTHON)
    return {"env": {"PYTHONPATH": str(folder)}}


def test_a_host_without_a_name_and_without_ipv6(tmp_path):
    temp = tmp_path / "temp"
    temp.mkdir()
    with Owner(temp, **bare_host(tmp_path)) as owner:
        found = owner.ask("network")
        assert (found["resolves"], found["ipv6"]) == (False, False), found
        owner.ask("start", pool="a", ranks=3)
        assert owner.ask("echo", pool="a", nbytes=1 << 20)["same"]
