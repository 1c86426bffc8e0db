"""Case 33: nothing of the pool listens where another machine could connect to, at any moment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.faults import note
from support.graphs import flux_prompt
from support.processes import wait_gone
from support.server import ComfyServer

CP = {"world_size": 2}

LISTEN = b"0A"


def listeners() -> dict[str, str]:
    """Address by inode of every TCP socket that listens, in this network namespace."""
    found = {}
    for table in ("tcp", "tcp6"):
        # The kernel lists listeners first and makes as many lines as are asked for: the thousands behind them cost time.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}", "rb", buffering=0) as lines:
            text = lines.read(160)
            while more := lines.read(160):
                text += more
                if any(line.split()[3:4] not in ([], [LISTEN]) for line in text.splitlines()[1:-1]):
                    break
            for line in text.splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == LISTEN:
                    found[fields[9].decode()] = fields[1].decode()
    return found


def is_loopback(address: str) -> bool:
    """Whether an address as /proc/net/tcp has it ("0100007F:1F90") is the loopback interface's."""
    digits = address.partition(":")[0]
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def family(pid: int) -> set[int]:
    """`pid` and its descendants, without a walk over all processes."""
    found, left = set(), [pid]
    while left:
        found.add(pid := left.pop())
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    left += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def socket_inodes(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


class ListenerWatch(threading.Thread):
    """Looks at the listeners of this process and all its descendants: thirty times per second for those outside of loopback, now
    and then for the others."""

    def __init__(self) -> None:
        super().__init__(name="listener-watch", daemon=True)
        self.outside: set[tuple[int, str]] = set()  # (pid, address)
        self.loopback: set[tuple[int, str]] = set()
        self.rounds, self.seconds, self._stop_now = 0, 0.0, threading.Event()

    def run(self) -> None:
        began, due, foreign = time.monotonic(), 0.0, set[str]()
        while not self._stop_now.is_set():
            now = time.monotonic()
            found = listeners()
            outside = {inode for inode, address in found.items() if not is_loopback(address)}
            if now >= due or outside - foreign:
                for pid in family(os.getpid()):
                    for inode in socket_inodes(pid) & found.keys():
                        (self.outside if inode in outside else self.loopback).add((pid, found[inode]))
                foreign, due = outside, now + 0.1  # looked up; those of other programs too
            self.rounds += 1
            time.sleep(0.03)  # what it misses is in the log of listen()
        self.seconds = time.monotonic() - began

    def __enter__(self) -> ListenerWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_now.set()
        self.join()


# Looking at tables misses what is gone at the next look. This notes every call of listen() in every process that has it preloaded.
LISTEN_LOGGER = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int listen(int fd, int backlog) {
    struct sockaddr_storage address; socklen_t size = sizeof address; char text[INET6_ADDRSTRLEN] = "", line[200];
    memset(&address, 0, sizeof address);
    getsockname(fd, (struct sockaddr *)&address, &size);
    if (address.ss_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)&address)->sin_addr, text, sizeof text);
    else if (address.ss_family == AF_INET6)
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&address)->sin6_addr, text, sizeof text);
    if (*text) {
        int out = open(getenv("LISTEN_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        int length = snprintf(line, sizeof line, "%d %s\n", getpid(), text);
        if (write(out, line, length) != length) abort();
        close(out);
    }
    int (*original)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
    return original(fd, backlog);
}
"""


@pytest.fixture(scope="module")
def listen_log(tmp_path_factory):
    """Environment that makes a process and its children note their listeners, and the file."""
    folder = tmp_path_factory.mktemp("listen")
    (folder / "log.c").write_text(LISTEN_LOGGER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "log.so", folder / "log.c", "-ldl"], check=True)
    log = folder / "log"
    log.touch()
    return {"LD_PRELOAD": str(folder / "log.so"), "LISTEN_LOG": str(log)}, log


def noted(log: Path) -> tuple[set[int], list[str]]:
    """Pids that listened at all, and the lines that are not about loopback."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return {int(pid) for pid, _ in lines}, [f"{pid} {ip}" for pid, ip in lines if not ipaddress.ip_address(ip).is_loopback]


def test_a_listener_of_no_time_at_all_is_noted(listen_log):
    environment, log = listen_log
    program = "import socket; [socket.create_server((ip, 0)).close() for ip in ('0.0.0.0', '127.0.0.1')]"
    subprocess.run([sys.executable, "-S", "-c", program], check=True, env={**os.environ, **environment})
    pids, outside = noted(log)
    assert outside == [f"{pid} 0.0.0.0" for pid in pids]
    assert len(pids) == 1
    log.write_text("")


@pytest.mark.parametrize(("kind", "address"), [("AF_INET", "0.0.0.0"), ("AF_INET6", "::")])
def test_the_watch_sees_a_listener_of_half_a_second(kind, address):
    if kind == "AF_INET6" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    program = f"import socket, time; s = socket.create_server(({address!r}, 0), family=socket.{kind}); time.sleep(0.5)"
    with ListenerWatch() as watch:
        subprocess.run([sys.executable, "-S", "-c", program], check=True)
    assert len(watch.outside) == 1
    assert is_loopback("0100007F:1F90")
    assert is_loopback("00000000000000000000000001000000:1F90")
    assert is_loopback("0000000000000000FFFF00000100007F:1F90")
    assert not is_loopback("00000000000000000000000000000000:1F90")
    assert not is_loopback("0200A8C0:1F90")


def test_nothing_listens_outside_of_loopback(comfyui_path, checkpoints_dir, listen_log):
    """From the start of the server to the end of its last child: import, rendezvous, load, call, shutdown."""
    case = "33 listeners of the server and its workers outside of loopback"
    environment, log = listen_log
    with ListenerWatch() as watch, ComfyServer(comfyui_path, models=checkpoints_dir, env=environment) as server:
        server.run(flux_prompt(cp=CP), timeout=120).check()
        ranks, pid, port = server.worker_pids(), server.pid, server.port
        assert len(ranks) == 2
        server.run(flux_prompt(cp=CP, loras=["flux_lora"]), timeout=120).check()
        children = server.workers()
        os.kill(pid, signal.SIGTERM)
        assert wait_gone([psutil.Process(pid), *children], 10) == []
    rate = watch.rounds / watch.seconds
    note(case, "listeners seen", 0, len(watch.outside))
    note(case, "looks at the tables per second (at least)", 10, rate)
    assert watch.outside == set()
    assert rate > 10
    # It looked at the right processes: the server's own port, and gloo's listeners on loopback.
    assert (pid, f"0100007F:{port:04X}") in watch.loopback
    assert {owner for owner, _ in watch.loopback} >= set(ranks)
    listened, outside = noted(log)
    assert outside == []
    assert listened >= {pid, *ranks}
