"""Case 33: nothing of the pool listens where another machine could connect to, at any moment."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.faults import note
from support.graphs import flux_prompt
from support.processes import wait_gone
from support.server import ComfyServer

CP = {"world_size": 2}


# It notes every call of listen() in every process that has it preloaded: the kernel's tables have no listener of the past.
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


def test_nothing_listens_outside_of_loopback(comfyui_path, checkpoints_dir, listen_log):
    """From the start of the server to the end of its last child: import, rendezvous, load, call, shutdown."""
    environment, log = listen_log
    with ComfyServer(comfyui_path, models=checkpoints_dir, env=environment) as server:
        server.run(flux_prompt(cp=CP), timeout=120).check()
        ranks, pid = server.worker_pids(), server.pid
        assert len(ranks) == 2
        server.run(flux_prompt(cp=CP, loras=["flux_lora"]), timeout=120).check()
        children = server.workers()
        os.kill(pid, signal.SIGTERM)
        assert wait_gone([psutil.Process(pid), *children], 10) == []
    listened, outside = noted(log)
    note("33 listeners of the server and its workers outside of loopback", "listeners seen", 0, len(outside))
    assert outside == []
    assert listened >= {pid, *ranks}  # it looked at the right processes
