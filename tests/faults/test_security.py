"""Cases 33 to 38: what a message, a file, a folder or a workflow can make the pool do."""

from __future__ import annotations

import ast
import contextlib
import ipaddress
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.faults import SOAK, Stopwatch, note
from support.graphs import flux_prompt
from support.package import ROOT
from support.pools import echo, small_pool
from support.processes import descendants, wait_gone
from support.server import ComfyServer, PromptRejected

from cp_runtime.batch import tensors
from cp_runtime.config import DeviceInventory, RuntimeConfig
from cp_runtime.errors import PoolError, PoolTimeout, ProtocolError, RankError
from cp_runtime.pool.channel import Channel, Closed
from cp_runtime.pool.controller import WorkerPool, WorkerSite
from cp_runtime.pool.launcher import DIRECTORY_PREFIX, make_directory
from cp_runtime.pool.protocol import (
    MAX_HEADER,
    TensorPacker,
    decode_header,
    flatten,
    read_tensor,
    unflatten,
)
from cp_runtime.pool.stacks import KEEP, PREFIX, collect_stacks, stacks_file

CP = {"world_size": 2}
TOLERANCE = 2e-4


# --- 33: listeners ---------------------------------------------------------------------------------------------------------

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
    """Looks at the listeners of this process and all its descendants: a thousand times per second or more for those outside of
    loopback, now and then for the others."""

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
            time.sleep(0.0005)
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
def test_the_watch_sees_a_listener_of_a_tenth_of_a_second(kind, address):
    if kind == "AF_INET6" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    program = f"import socket, time; s = socket.create_server(({address!r}, 0), family=socket.{kind}); time.sleep(0.1)"
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


# --- 34: what the code may not call ------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = frozenset(
    [
        "pickle",
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "multiprocessing",
        "code",
        "codeop",
        "pty",
        "runpy",
        "xmlrpc",
        "socketserver",
        "http.server",
        "torch.multiprocessing",
        "torch.distributed.rpc",
        "torch.package",
        "torch.hub",
        "asyncio.subprocess",
        "commands",
        "popen2",
        "yaml",
    ]
)
FORBIDDEN_CALLS = frozenset(
    [
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.posix_spawnp",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.jit.load",
        "torch.export.load",
        "torch.utils.cpp_extension.load",
        "torch.ops.load_library",
        "torch.serialization.add_safe_globals",
        "torch.distributed.TCPStore",
        "torch.distributed.HashStore",
        "socket.create_server",
        "importlib.reload",
        "builtins.eval",
        "builtins.exec",
        "builtins.compile",
        "builtins.__import__",
        "asyncio.create_subprocess_shell",
        "asyncio.start_server",
        "aiohttp.web.run_app",
    ]
)
FORBIDDEN_PREFIXES = ("os.exec", "os.spawn")
# By their last name, whatever they hang on: object collectives pickle; `listen` opens a port.
FORBIDDEN_METHODS = frozenset(
    [
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
        "_object_to_tensor",
        "_tensor_to_object",
        "rpc_sync",
        "rpc_async",
        "listen",
        "send_pyobj",
        "recv_pyobj",
        "find_class",
        "run_app",
    ]
)
# Code by name, each with its reason.
DYNAMIC_IMPORTS = {
    ("cp_runtime/comfy/modules.py", "find"): "callers let names in PACKAGES and MIRRORED through, and no others",
    ("cp_runtime/attention/kernels.py", "_installed"): "callers pass literals",
    ("cp_runtime/families/__init__.py", ""): "the files of its own folder",
    ("cp_runtime/comfy/sharded.py", "_attention_by_name"): "the names are in the plan tables",
}


class Offences(ast.NodeVisitor):
    """Collects what a module must not do, with the line."""

    def __init__(self, file: str) -> None:
        self.file, self.found, self.names, self.inside = file, [], {}, [""]

    def offence(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{self.file}:{node.lineno}: {what}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported(node, alias.name)
            self.names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if node.module and not node.level else alias.name
            self.imported(node, full)
            self.names[alias.asname or alias.name] = full
            if self.forbidden(full) or alias.name in FORBIDDEN_METHODS:
                self.offence(node, f"imports {full}")

    def imported(self, node: ast.AST, name: str) -> None:
        parts = name.split(".")
        if any(".".join(parts[:n]) in FORBIDDEN_MODULES for n in range(1, len(parts) + 1)):
            self.offence(node, f"imports {name}")

    def dotted(self, node: ast.AST) -> str:
        """Full name of an expression such as `dist.broadcast`, aliases resolved; its last name where it hangs on a value."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        return "?"

    def forbidden(self, name: str) -> bool:
        return name in FORBIDDEN_CALLS or name.startswith(FORBIDDEN_PREFIXES)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        self.imported(node, name)
        if self.forbidden(name) or node.attr in FORBIDDEN_METHODS:
            self.offence(node, f"uses {name}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self.forbidden(self.dotted(node)):
            self.offence(node, f"uses {self.dotted(node)}")

    def visit_Assert(self, node: ast.Assert) -> None:
        self.offence(node, "an assert, which python -O leaves out")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}

        def is_true(argument: str) -> bool:
            return isinstance(given.get(argument), ast.Constant) and given[argument].value is True

        if name == "torch.load" and not is_true("weights_only"):
            self.offence(node, "torch.load without weights_only=True")
        if name.endswith("numpy.load") and "allow_pickle" in given:
            self.offence(node, "numpy.load with allow_pickle")
        if "shell" in given and not (isinstance(given["shell"], ast.Constant) and given["shell"].value is False):
            self.offence(node, "a shell")
        literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
        dynamic = name in ("importlib.import_module", "import_module") and not literal
        if dynamic and (self.file, self.inside[-1]) not in DYNAMIC_IMPORTS:
            self.offence(node, "imports a module by a name from elsewhere")
        if name == "getattr" and len(node.args) > 1 and self.dotted(node.args[0]) in ("builtins", "__builtins__", "os", "sys"):
            self.offence(node, f"takes something out of {self.dotted(node.args[0])} by name")
        self.generic_visit(node)


def offences(source: str, file: str = "snippet.py") -> list[str]:
    """What a module does that it must not."""
    visitor = Offences(file)
    visitor.visit(ast.parse(source))
    return visitor.found


BAD_SNIPPETS = [
    "import pickle",
    "import pickle as p",
    "from pickle import loads",
    "import _pickle",
    "import dill",
    "import marshal, json",
    "import shelve",
    "from multiprocessing.connection import Connection",
    "from multiprocessing import connection",
    "import torch.multiprocessing as mp",
    "import torch\nx = torch.multiprocessing.Queue()",
    "eval('1')",
    "exec(text)",
    "compile(text, 'f', 'exec')",
    "__import__(name)",
    "import builtins\nbuiltins.eval('1')",
    "from builtins import exec as run\nrun('1')",
    "import builtins\ngetattr(builtins, name)('1')",
    "run = eval",
    "import os\nos.system('true')",
    "import os as o\no.system('true')",
    "from os import system",
    "import os\nos.popen('true')",
    "import os\nos.execv(a, b)",
    "import os\nos.spawnl(a, b)",
    "import subprocess\nsubprocess.run('true', shell=True)",
    "import subprocess as s\ns.Popen('true', shell=flag)",
    "launcher.start(argv, shell=1)",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch\ntorch.load(path, weights_only=flag)",
    "from torch import load\nload(path)",
    "import torch as t\nt.load(path)",
    "import torch\ntorch.jit.load(path)",
    "import numpy\nnumpy.load(path, allow_pickle=True)",
    "import torch.distributed as dist\ndist.broadcast_object_list(x)",
    "from torch.distributed import all_gather_object",
    "group.send_object_list(x)",
    "import torch.distributed as dist\ndist.recv_object_list(x)",
    "import torch.distributed.rpc",
    "import torch.distributed as dist\ndist.TCPStore('0.0.0.0', 1)",
    "sock.listen()",
    "import socket\nsocket.create_server(a)",
    "from aiohttp import web\nweb.run_app(a)",
    "import importlib\nimportlib.import_module(name)",
    "from importlib import import_module\nimport_module(name)",
    "assert x > 0, 'a check'",
    "import yaml",
]


@pytest.mark.parametrize("snippet", BAD_SNIPPETS)
def test_the_static_check_finds(snippet):
    assert offences(snippet)


def test_the_static_check_is_quiet_about_harmless_code():
    harmless = """
import json, os, re, subprocess, torch, importlib
import torch.distributed as dist
from torch import nn
pattern = re.compile("x")
model.eval()
model.compile()
torch.load(path, weights_only=True)
importlib.import_module("cp_runtime.pool.worker")
subprocess.Popen(["x"], shell=False)
dist.broadcast(x, 0); dist.all_gather(a, b); channel.send({}); channel.receive()
json.loads(text); os.read(fd, 1)
"""
    assert offences(harmless) == []


def test_no_code_of_the_package_can_run_what_it_is_sent():
    files = [ROOT / "__init__.py", *sorted((ROOT / "cp_runtime").rglob("*.py")), *sorted((ROOT / "nodes").rglob("*.py"))]
    found = [line for file in files for line in offences(file.read_text(), str(file.relative_to(ROOT)))]
    note("34 static check", "files checked (at least)", 40, len(files))
    assert len(files) > 40
    assert found == []


# --- 35: messages -------------------------------------------------------------------------------------------------------------

BLOCK = 4096  # bytes of shared memory that come with a message


def nested(depth: int, kind: str = "") -> object:
    """A value that holds a value that holds a value."""
    value: object = 1
    for _ in range(depth):
        value = {kind: [value]} if kind else [value]
    return value


class Evil:
    """What unpickling of it does, it does at once: make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


HOSTILE = {
    "offset below zero": {"$tensor": ["float32", [2], -64]},
    "offset just behind the end": {"$tensor": ["uint8", [1], BLOCK]},
    "offset far behind the end": {"$tensor": ["float32", [2], 2**62]},
    "offset that overflows": {"$tensor": ["float32", [2], 2**70]},
    "offset not aligned": {"$tensor": ["float32", [2], 4]},
    "offset of another type": {"$tensor": ["float32", [2], "0"]},
    "offset None": {"$tensor": ["float32", [2], None]},
    "offset a fraction": {"$tensor": ["float32", [2], 64.5]},
    "last byte behind the end": {"$tensor": ["uint8", [65], BLOCK - 64]},
    "shape larger than the block": {"$tensor": ["float32", [BLOCK], 0]},
    "shape that overflows to a small one": {"$tensor": ["float32", [2**32, 2**32, 4], 0]},
    "shape of 2 ** 62": {"$tensor": ["float32", [2**62, 4], 0]},
    "shape empty by 0, else beyond int64": {"$tensor": ["float32", [0, 2**70], 0]},
    "shape below zero": {"$tensor": ["float32", [-1], 0]},
    "shape twice below zero": {"$tensor": ["float32", [-2, -2], 0]},
    "shape of text": {"$tensor": ["float32", "ab", 0]},
    "shape of fractions": {"$tensor": ["float32", [1.5], 0]},
    "shape that is no list": {"$tensor": ["float32", 2**80, 0]},
    "shape of lists": {"$tensor": ["float32", [[2]], 0]},
    "strides": {"$tensor": ["float32", [2], 0, [2**40]]},
    "strides in place of the offset": {"$tensor": ["float32", [2], [2**40, 1]]},
    "unknown dtype": {"$tensor": ["object", [2], 0]},
    "dtype that is a function of torch": {"$tensor": ["load", [2], 0]},
    "dtype that is a path": {"$tensor": ["../../etc/passwd", [2], 0]},
    "dtype of another type": {"$tensor": [["float32"], [2], 0]},
    "leaf of another length": {"$tensor": ["float32"]},
    "leaf of another type": {"$tensor": 5},
    "leaf that is a file": {"$file": "/etc/passwd"},
    "leaf that is a handle": {"$shm": ["/dev/shm/x", 3]},
    "leaf that is a class": {"$class": "os.system"},
    "leaf with code": {"py/reduce": ["os.system", ["true"]]},
    "leaf with a pickle": {"$pickle": pickle.dumps(Evil(Path("/nonexistent/x"))).hex()},
    "module attribute as dtype": {"$dtype": "hub"},
    "dtype that is a list": {"$dtype": ["float32"]},
    "device with a command": {"$device": "cpu\n; reboot"},
    "device that overflows": {"$device": "cuda:99999999999999999999"},
    "number that is no text": {"$float": None},
    "number with a word": {"$float": "five"},
    "number too large for a float": {"$float": 10**400},
    "list as a key": {"$dict": [[[1], 2]]},
    "dict as a key": {"$dict": [[{"$dict": []}, 2]]},
    "pairs of one": {"$dict": [[1]]},
    "dict that is a number": {"$dict": 7},
    "tuple that is a number": {"$tuple": 7},
    "two kinds at once": {"$tuple": [], "$dict": []},
    "plain object": {"a": 1, "b": 2},
    "conditioning that nobody kept": {"$cached": "c999999"},
    "a list as name of what is to be kept": {"$store": [["x"], {"$tensor": ["float32", [2], 0]}]},
    "text in a shape, which Python would repeat": {"$tensor": ["float32", ["1", 2**50], 0]},
    "a list in a shape, which Python would repeat": {"$tensor": ["float32", [[2], 2**50], 0]},
}
# Deeper than any message of ours. They may be taken; but Python's own limit must not be what stops them.
DEEP = {
    **{f"{depth} lists in each other": nested(depth) for depth in (200, 450, 600, 900)},
    **{f"{depth} tuples in each other": nested(depth, "$tuple") for depth in (200, 300, 450)},
}


def hostile_tree(rng: random.Random) -> object:
    """A tree that looks like a message and is not one, or just is one."""
    numbers = [0, 1, 64, 128, -1, -64, BLOCK, BLOCK - 64, 2**31, 2**63, 2**70, rng.randrange(2**40), 0.5, None, "1"]

    def number() -> object:
        return rng.choice(numbers)

    kind = rng.randrange(8)
    if kind < 4:
        dtype = rng.choice(["float32", "uint8", "bool", "int64", "qint8", "complex128", "float8_e4m3fn", "load", "", 3, None])
        shape = [n for n in (number() for _ in range(rng.randrange(4))) if n != "1"]  # Python repeats text: gigabytes of it
        shape = shape if rng.random() < 0.8 else [rng.randrange(4) for _ in range(3)]
        return {rng.choice(["$tensor", "$tensor", "$tensor", "$shared", "$store"]): [dtype, shape, number()][: rng.randrange(2, 5)]}
    if kind == 4:
        return {rng.choice(["$tuple", "$dict", "$float", "$dtype", "$device", "$cached", "$x", ""]): number()}
    if kind == 5:
        return [hostile_tree(rng) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {"$dict": [[hostile_tree(rng), hostile_tree(rng)]]}
    return rng.choice([rng.choice(list(HOSTILE.values())), "/etc/passwd", "$(reboot)", "\x00", True, -0.0, 2**64])


def honest_frame(rng: random.Random) -> bytes:
    """A frame as the controller sends it."""
    packer = TensorPacker()
    value = {"x": torch.zeros(rng.randrange(1, 20)), "options": {"sigmas": (1.5, None, float("inf")), "dtype": torch.float16}}
    tree = flatten({**value, "cond": [torch.zeros(2, 3, dtype=torch.int64)] * 2}, packer.add)
    return frame({"command": "echo", "seq": rng.randrange(1000), "nbytes": packer.nbytes, "drop": [], "value": tree})


def frame(header: object) -> bytes:
    """Any JSON value as a frame."""
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


def hostile_frames(rng: random.Random, count: int) -> Iterator[bytes]:
    """Random, oversized, cut off, bit-flipped, and well-formed but hostile."""
    evil = pickle.dumps(Evil(Path("/nonexistent/x")))
    for i in range(count):
        match i % 6:
            case 0:
                data = rng.randbytes(rng.randrange(200))
                yield data if rng.random() < 0.5 else struct.pack("<Q", len(data)) + data
            case 1:
                yield (
                    struct.pack("<Q", rng.choice([MAX_HEADER + 1, 2**63, 2**64 - 1, rng.randrange(MAX_HEADER + 1, 2**64)])) + b"{}"
                )
            case 2:
                whole = honest_frame(rng)
                yield whole[: rng.randrange(len(whole))]
            case 3:
                flipped = bytearray(honest_frame(rng))
                for _ in range(rng.randrange(1, 9)):
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                yield bytes(flipped)
            case 4:
                header = {"command": rng.choice(["echo", "exec", None, 5]), "seq": rng.choice([1, "x", None, 2**70, 0.5])}
                yield frame({**header, "nbytes": BLOCK, "value": {"$dict": [["x", hostile_tree(rng)]]}})
            case _:
                deep = rng.choice([b"[", b'{"a":', b'{"value":['])
                body = rng.choice([evil, deep * 5000, b'{"a":' + b"9" * 5000 + b"}", b"[1]", b"null", b"\xff\xfe{", b'{"a":NaN}'])
                yield struct.pack("<Q", len(body)) + body


class Executed:
    """Notes whatever Python runs, imports, opens or starts in this thread while it is on. An audit hook cannot be removed."""

    EVENTS = (
        "exec",
        "compile",
        "import",
        "open",
        "os.",
        "subprocess.",
        "pickle.",
        "marshal.",
        "ctypes.",
        "socket.connect",
        "code.",
    )

    def __init__(self) -> None:
        self.thread, self.events = 0, []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.thread == threading.get_ident() and event.startswith(self.EVENTS):
            self.events.append((event, str(args)[:100]))

    def __enter__(self) -> list[tuple[str, str]]:
        self.events = []
        self.thread = threading.get_ident()
        return self.events

    def __exit__(self, *_: object) -> None:
        self.thread = 0


EXECUTED = Executed()


def take(data: bytes, block: torch.Tensor) -> str:
    """Feed bytes to a real channel and read what comes out as a rank does; say what became of them."""
    one, other = socket.socketpair()
    channel = Channel(other)
    one.setblocking(False)
    left, result = memoryview(data), "taken"
    try:
        with contextlib.suppress(BlockingIOError):
            left = left[one.send(left) :]
        one.shutdown(socket.SHUT_WR)
        while True:
            header = channel.receive(time.monotonic() + 5)
            assert type(header) is dict
            if "value" in header:
                value = unflatten(header["value"], lambda leaf: read_tensor(block, leaf))
                for tensor in tensors(value):
                    first = tensor.data_ptr() - block.data_ptr()
                    assert tensor.numel() == 0 or 0 <= first <= first + tensor.nbytes <= block.numel()
    except Closed:
        return result
    except (ProtocolError, PoolTimeout) as error:
        return type(error).__name__
    finally:
        one.close()
        channel.close()


def test_hostile_frames_give_typed_errors_and_run_nothing():
    count = 10_000 if SOAK else 1_000
    case = f"35 {count:,} hostile frames"
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    for data in hostile_frames(random.Random(1), 300):  # what is imported at first use
        take(data, block)
    for name in ("utf_8", "utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"):  # json looks
        "x".encode(name)
    outcomes, slowest = [], 0.0
    with EXECUTED as events:
        for data in hostile_frames(random.Random(35), count):
            began = time.monotonic()
            outcomes.append(take(data, block))
            slowest = max(slowest, time.monotonic() - began)
    Stopwatch(case).within(1, "the slowest frame", slowest)
    note(case, "untyped errors, code run, reads outside of the block", 0, len(events))
    assert events == []
    assert not block.any()
    assert "PoolTimeout" not in outcomes
    assert set(outcomes[1::6]) == {"ProtocolError"}  # oversized: refused at once, and not waited for
    # Both happened often, so the frames are neither all garbage nor all harmless.
    assert outcomes.count("ProtocolError") > count / 4
    assert outcomes.count("taken") > count / 20


def test_what_notes_running_code_does_note_it(tmp_path):
    with EXECUTED as events, contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))  # noqa: S301
    assert {"pickle.find_class", "os.system"} <= {event for event, _ in events}
    assert (tmp_path / "marker").exists()


def read_value(tree: object) -> None:
    """Take a value as a rank does."""
    header = decode_header(json.dumps({"value": tree}).encode())
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    unflatten(header["value"], lambda leaf: read_tensor(block, leaf))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name):
    with pytest.raises(ProtocolError):
        read_value(HOSTILE[name])


@pytest.mark.parametrize("name", DEEP)
def test_deep_values_are_refused_or_taken(name):
    with contextlib.suppress(ProtocolError):
        read_value(DEEP[name])


def send_raw(pool: WorkerPool, data: bytes) -> None:
    """Write to rank 0 what the controller would never write."""
    sock = pool.channels[0].sock
    sock.setblocking(True)
    sock.settimeout(5)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)
    sock.setblocking(False)


def hostile_request(pool: WorkerPool, tree: object, **header: object) -> str:
    """Have all ranks read a value; the type of the error, or what came."""
    body = {"value": {"$dict": [["x", tree]]}, "drop": [], "nbytes": BLOCK, **header}
    try:
        pool.request("echo", body, timeout=10)
    except RankError as error:
        return error.kind if len(str(error)) < 50_000 else f"{error.kind} of {len(str(error)):,} characters, which floods the log"
    return "taken"


def test_living_ranks_answer_hostile_values_and_live_on():
    """Every rank answers with a typed error, and the same processes serve the next command."""
    count = 2_000 if SOAK else 200
    with small_pool() as pool:
        pool.payload(BLOCK)  # that much memory is there, as after any message
        pids, wrong = list(pool.pids), {}
        watch = Stopwatch(f"35 {count + len(HOSTILE) + len(DEEP):,} hostile messages to living ranks")
        for name, tree in {**HOSTILE, **DEEP}.items():
            kind = hostile_request(pool, tree)
            if kind != "ProtocolError" and not (kind == "taken" and name in DEEP):
                wrong[name] = kind
        rng = random.Random(36)
        for _ in range(count):
            tree = hostile_tree(rng)
            if (kind := hostile_request(pool, tree)) not in ("ProtocolError", "taken"):
                wrong[str(tree)[:100]] = kind
        for name, header in {"drop a key": {"drop": ["c1"]}, "drop a number": {"drop": 5}, "no value": {"value": 7}}.items():
            if hostile_request(pool, 1, **header) == "taken":
                wrong[name] = "taken"
        watch.within(30 if SOAK else 10, "all are answered")
        assert wrong == {}
        assert torch.equal(echo(pool, torch.arange(5)), torch.arange(5))
        assert pool.pids == pids


def test_a_message_cannot_make_ranks_allocate():
    """The sender makes room for a message. A rank that did so on its word could be made to fill the machine's memory."""
    with small_pool() as pool:
        echo(pool, torch.ones(3))
        block = os.dup(pool._request.fd)
        before = os.fstat(block).st_size
        with contextlib.suppress(PoolError):
            hostile_request(pool, 1, nbytes=64 << 20)
        after = os.fstat(block).st_size
        os.close(block)
        assert after == before


def evil_frame(marker: Path) -> bytes:
    data = pickle.dumps(Evil(marker))
    return struct.pack("<Q", len(data)) + data


RAW = {
    "random bytes": lambda _: random.Random(5).randbytes(4096),
    "a pickle": evil_frame,
    "an unknown command": lambda marker: frame({"command": f"__import__('os').system('touch {marker}')", "seq": 1, "nbytes": 0}),
    "a header of other types": lambda _: frame({"command": "echo", "seq": {"a": [1]}, "nbytes": "all", "drop": 1, "value": 1}),
    "a frame that is cut off": lambda _: frame({"command": "echo"})[:-3],
    "a frame above the limit": lambda _: struct.pack("<Q", MAX_HEADER + 1) + b"x" * 1000,
    "brackets": lambda _: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a memory size that overflows": lambda _: frame({"command": "echo", "seq": 1, "nbytes": 2**70, "drop": [], "value": 1}),
    "a memory size below zero": lambda _: frame({"command": "echo", "seq": 1, "nbytes": -(2**40)}),
    "NaN": lambda _: frame({"command": "echo", "seq": float("nan"), "nbytes": 0}),
    "a flood of cancels": lambda _: frame({"command": "cancel"}) * 5000 + frame([]),
}


@pytest.mark.parametrize("name", RAW if SOAK else list(RAW)[:5])
def test_living_ranks_end_at_frames_they_cannot_read(name, tmp_path):
    """Both ranks end by themselves: no signal, no hang. The pool that every case starts with is the next one of the case before."""
    marker = tmp_path / "marker"
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.arange(5)), torch.arange(5))
        send_raw(pool, RAW[name](marker))
        if name == "a frame that is cut off":  # the rank waits for the rest, until there can be none
            pool.channels[0].sock.shutdown(socket.SHUT_WR)
        watch = Stopwatch(f"35 {name} on the socket of a living rank")
        for process in pool.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        watch.within(2, "all ranks have ended")
        assert [process.returncode for process in pool.processes] in ([1, 1], [0, 1], [0, 0])
        began = time.monotonic()
        with pytest.raises(PoolError):
            echo(pool, torch.arange(5), timeout=5)
        assert time.monotonic() - began < 5
        assert not pool.alive
    assert not marker.exists()


# --- 36: folders --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_umask():
    """Files are readable by everybody unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_rendezvous_folder_is_private(tmp_path, monkeypatch, open_umask):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_pool() as pool:
        folder = pool._directory
        assert folder.parent == tmp_path
        assert (mode(folder), folder.lstat().st_uid) == (0o700, os.getuid())
        assert {path.name for path in folder.iterdir()} >= {"stacks-0", "stacks-1", "store"}
        for rank in range(2):
            assert mode(stacks_file(folder, rank)) == 0o600
        # Links of others that carry our names are neither followed nor removed with old files of ours.
        victim = tmp_path / "victim"
        victim.write_text("precious")
        links = [tmp_path / f"{PREFIX}{i}.txt" for i in range(KEEP + 3)]
        for link in links:
            link.symlink_to(victim)
        stacks = collect_stacks(folder, pool.processes, "a test")
        assert (mode(stacks), stacks.is_symlink()) == (0o600, False)
        assert "Thread" in stacks.read_text() or "File " in stacks.read_text()
        assert all(link.is_symlink() for link in links)
        assert victim.read_text() == "precious"
    assert not folder.exists()


def test_only_own_folders_of_dead_processes_are_swept(tmp_path, monkeypatch, open_umask, dead_pid):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    run, victim = tmp_path / "run", tmp_path / "victim"
    for folder in (run, victim):
        folder.mkdir()
    (victim / "file").write_text("precious")

    own = run / f"{DIRECTORY_PREFIX}{dead_pid}-own"
    own.mkdir()
    (own / "store").write_text("x")
    (own / "link").symlink_to(victim, target_is_directory=True)
    link = run / f"{DIRECTORY_PREFIX}{dead_pid}-link"
    link.symlink_to(victim, target_is_directory=True)
    living = run / f"{DIRECTORY_PREFIX}{os.getppid()}-living"
    other = run / f"{DIRECTORY_PREFIX}notes"
    for folder in (living, other):
        folder.mkdir()
    foreign = run / f"{DIRECTORY_PREFIX}{dead_pid}-foreign"
    if os.getuid() == 0:
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)

    made = [make_directory() for _ in range(3)]
    assert len({*made}) == 3
    assert all(mode(folder) == 0o700 and folder.parent == run for folder in made)
    assert not own.exists()
    assert link.is_symlink()
    assert (victim / "file").read_text() == "precious"
    assert living.exists()
    assert other.exists()
    assert foreign.exists() == (os.getuid() == 0)


# --- 37: model files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(checkpoints_dir, tmp_path_factory):
    """A folder of models, with the same readable model file inside of it and in several places outside."""
    base = tmp_path_factory.mktemp("shelf")
    inside = base / "models" / "diffusion_models"
    for folder in (inside, base / "models" / "checkpoints", base / "models" / "diffusion_models2", base / "elsewhere" / "sub"):
        folder.mkdir(parents=True)
    source = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    shutil.copy(source, inside / "flux.safetensors")
    for place in (base, base / "models", base / "models" / "diffusion_models2", base / "elsewhere", base / "elsewhere" / "sub"):
        os.link(inside / "flux.safetensors", place / "secret.safetensors")
    (inside / "link").symlink_to(base / "elsewhere" / "sub", target_is_directory=True)
    return base


def write_evil(folder: Path, marker: Path) -> list[Path]:
    """Checkpoints that would run a command when they are unpickled, in torch's file format and its old one."""
    files = []
    for name, new in (("evil.ckpt", True), ("evil_old.ckpt", False), ("evil.pt", True)):
        files.append(folder / name)
        torch.save({"state_dict": {"x": Evil(marker)}}, files[-1], _use_new_zipfile_serialization=new)
    return files


@pytest.fixture(scope="module")
def model_ranks(comfyui_path, shelf):
    """Ranks with ComfyUI, which may read models from one folder."""
    config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), world_size=2)
    arguments, folder = ("--cpu", "--base-directory", str(shelf)), str(shelf / "models" / "diffusion_models")
    pool = WorkerPool(config, WorkerSite(comfyui=str(comfyui_path), arguments=arguments, model_folders=(folder,)))
    pool.start()
    yield pool
    pool.kill()


def mirror(pool: WorkerPool, path: str, **changes: object) -> str:
    """Ask the ranks to load a model file; what their error says, or nothing."""
    file = os.stat(path)
    recipe = {"loader": "load_diffusion_model", "path": path, "options": {}, "stamp": [file.st_size, file.st_mtime_ns], **changes}
    body = {"key": f"k{time.monotonic_ns()}", "recipe": recipe, "patches": [], "patches_uuid": "u", "forget": []}
    try:
        pool.request("mirror", body, timeout=60)
    except RankError as error:
        return f"{error.kind}: {error.message}"
    return ""


OUTSIDE = {
    "beside the models": "{base}/secret.safetensors",
    "two dots": "{inside}/../../secret.safetensors",
    "one level of two dots": "{inside}/../secret.safetensors",
    "a name that begins alike": "{base}/models/diffusion_models2/secret.safetensors",
    "two dots and a name that begins alike": "{inside}/../diffusion_models2/secret.safetensors",
    "doubled slashes": "{base}//models//diffusion_models2///secret.safetensors",
    "two dots behind a link": "{inside}/link/../secret.safetensors",
    "a device": "/dev/null",
    "a file of the system": "/etc/hostname",
    "memory of a process": "/proc/self/mem",
    "the folder of all models": "{base}/models",
}


def test_the_workers_read_models_from_the_model_folders_only(model_ranks, shelf):
    inside = shelf / "models" / "diffusion_models"
    pids, taken = list(model_ranks.pids), {}
    for path in (inside / "flux.safetensors", inside / "." / "flux.safetensors", inside / "link" / "secret.safetensors"):
        assert mirror(model_ranks, str(path)) == ""  # links in the model folders are the user's
    for name, pattern in OUTSIDE.items():
        path = pattern.format(base=shelf, inside=inside)
        if not os.path.exists(path):
            continue
        said = mirror(model_ranks, path)  # behind a link, two dots may also mean a file in the folder, which is not there
        if not re.match(r"MirrorError: (\S+ is outside of ComfyUI's model folders\. Move|the model file \S+ cannot be read)", said):
            taken[name] = said or "loaded"
    note("37 paths outside of the model folders", "read", 0, len(taken))
    assert taken == {}
    assert model_ranks.pids == pids


@pytest.mark.parametrize("loader", ["load_torch_file", "os.system", "__class__", "", None, 5, ["load_diffusion_model"]])
def test_the_workers_call_the_known_loaders_only(loader, model_ranks, shelf):
    said = mirror(model_ranks, str(shelf / "models" / "diffusion_models" / "flux.safetensors"), loader=loader)
    assert said.startswith("MirrorError: unknown loader")


@pytest.mark.parametrize(
    "options",
    [{"dtype": "load"}, {"dtype": "__class__"}, {"custom_operations": "os"}, {"load_device": "cpu"}, {"dtype": ["float32"]}],
)
def test_the_workers_take_the_known_options_only(options, model_ranks, shelf):
    said = mirror(model_ranks, str(shelf / "models" / "diffusion_models" / "flux.safetensors"), options=options)
    assert said.startswith("MirrorError: ")


def test_the_workers_run_nothing_in_a_checkpoint(model_ranks, shelf, tmp_path):
    marker = tmp_path / "marker"
    for path in write_evil(shelf / "models" / "diffusion_models", marker):
        for loader in ("load_diffusion_model", "load_checkpoint_guess_config"):
            said = mirror(model_ranks, str(path), loader=loader)
            assert "UnpicklingError" in said or "weights_only" in said.lower(), said
            assert not marker.exists()
        torch.load(path, weights_only=False)  # and it would have
        assert marker.exists()
        marker.unlink()


@pytest.fixture(scope="module")
def graph_server(comfyui_path, shelf):
    """A server for hostile workflows; the workers start with the first good one."""
    with ComfyServer(comfyui_path, models=shelf / "models") as running:
        yield running


def test_a_checkpoint_in_a_graph_runs_nothing(graph_server, shelf, tmp_path):
    marker = tmp_path / "marker"
    for folder in ("diffusion_models", "checkpoints"):
        write_evil(shelf / "models" / folder, marker)
    for name in ("evil.ckpt", "evil_old.ckpt", "evil.pt"):
        prompt = flux_prompt(cp=CP)
        prompt["loader"]["inputs"]["unet_name"] = name
        checkpoint = flux_prompt(cp=CP)
        checkpoint["loader"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}}
        for graph in (prompt, checkpoint):
            result = graph_server.run(graph)
            assert result.status == "error"
            assert result.error.node_id == "loader"
            assert "weights_only" in result.error.exception_message.lower()
            assert not marker.exists()
    assert graph_server.worker_pids() == []


# --- 38: workflows ------------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
COMMANDS = [
    "cpu; touch {m}",
    "cpu\ntouch {m}",
    "$(touch {m})",
    "`touch {m}`",
    "cpu|touch {m}",
    "cpu && touch {m}",
    "cpu' 'touch {m}",
]
SETTINGS: dict[str, list[object]] = {
    "world_size": [-1, -(2**63), 1025, 10**6, 10**30, NAN, INF, "many", "2; reboot", "0x2", None, {"a": 1}, [1, 2, 3], []],
    "ulysses_degree": [1024, 3, 10**6, 2**64, -3, 1e308, NAN, "2 3"],
    "ring_degree": [1024, 3, 10**6, -1, INF, None],
    "batch_degree": [1024, 3, 10**6, -1, -INF, {}],
    "step_timeout": [NAN, INF, -INF, "nan", "inf", "1e999", 0, -5, 1e300, 10**400, "soon", None, [1.0]],
    "devices": [
        *COMMANDS, "cuda:0", "cpu,,cpu", "cpu:", "CPU", "cpu\x00", "cpu\u200b", "../../dev/null", "meta", "cpu" + ",cpu" * 50_000,
        {"a": "cpu"},
    ],
    "backend": ["mpi", "nccl", "gloo; true", "", None, 5, ["gloo"]],
    "rotate_method": ["none", "__import__('os')", None],
    "on_unsupported": ["ignore", "Error", {}],
}  # fmt: skip


def refusal(server: ComfyServer, prompt: dict) -> tuple[str, str]:
    """(who refused, what it says), "" for a prompt that ran."""
    try:
        result = server.run(prompt, timeout=30)
    except PromptRejected as rejected:
        (errors,) = (entry["errors"] for entry in rejected.node_errors.values())
        error = errors[0]
        named = error["extra_info"]
        return "queue", json.dumps([error["message"], error["details"], named.get("input_name"), named.get("received_value")])
    return (result.error.node_type, result.error.exception_message) if result.error else ("", "it ran")


def test_hostile_settings_are_refused_before_anything_starts(graph_server, tmp_path):
    marker, wrong, tried = tmp_path / "marker", {}, 0
    before = {process.pid for process in descendants(graph_server.pid)}
    watch = Stopwatch("38 hostile workflows")
    for field, values in SETTINGS.items():
        for value in values:
            prompt = flux_prompt(cp={})
            prompt["cp_config"]["inputs"][field] = value.format(m=marker) if value in COMMANDS else value
            tried += 1
            who, said = refusal(graph_server, prompt)
            named = (
                rf"{field}( x \w+)*: got .*; allowed: .+\. .+"
                if not field.endswith("degree")
                else r"\w+_degree.*: got .*; allowed: .+\. .+"
            )
            ok = field in said if who == "queue" else who == "CPConfig" and re.match(named, said, re.DOTALL)
            if not ok or len(said) > 4000:
                wrong[f"{field}={value!r:.60}"] = f"{who}: {said:.200} ({len(said)} characters)"
    note("38 hostile workflows", "settings not refused by name", 0, len(wrong))
    watch.within(0.2 * tried, f"{tried} settings are refused")
    assert wrong == {}
    assert {process.pid for process in descendants(graph_server.pid)} == before
    assert "starting" not in graph_server.log_text().partition("Starting server")[2]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("node", "config"),
    [(node, config) for node in ("cp_apply", "sampler") for config in ({"devices": ["cpu", "cpu"]}, "cpu,cpu", 5)]
    + [("cp_apply", None)],  # of the sampler, that input may be left out
)
def test_a_config_that_is_no_config_is_refused(node, config, graph_server):
    """ComfyUI lets a workflow put any JSON in the place of a link."""
    prompt = flux_prompt(cp={}, node="CPSampler")
    prompt[node]["inputs"]["cp_config"] = config
    who, said = refusal(graph_server, prompt)
    assert who in ("ApplyContextParallel", "CPSampler", "queue")
    assert "cp_config" in said
    assert graph_server.worker_pids() == []


def test_unknown_settings_have_no_effect(graph_server):
    """ComfyUI hands a node the inputs that it declares, and no others."""
    prompt = flux_prompt(cp={"world_size": 1})
    prompt["cp_config"]["inputs"] |= {
        "comfyui": "/tmp",
        "model_folders": ["/"],
        "__class__": 1,
        "inventory": {"type": "cpu", "count": 9},
    }
    prompt["cp_apply"]["inputs"]["config"] = {"devices": ["cpu", "cpu"]}
    stock = graph_server.latent(graph_server.run(flux_prompt()).check())
    assert torch.equal(graph_server.latent(graph_server.run(prompt).check()), stock)
    assert graph_server.worker_pids() == []


def test_the_next_good_prompt_runs(graph_server):
    stock = graph_server.latent(graph_server.run(flux_prompt()).check())
    assert graph_server.worker_pids() == []
    out = graph_server.latent(graph_server.run(flux_prompt(cp=CP), timeout=120).check())
    assert (out - stock).abs().max() <= TOLERANCE * stock.std()
    assert len(graph_server.worker_pids()) == 2
