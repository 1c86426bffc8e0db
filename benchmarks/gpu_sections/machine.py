"""Sections about the machine: what it has, and what NCCL, its clocks and its memory do with one rank."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata

import psutil
import torch
import torch.distributed as dist
from support import families

from cp_runtime.engine.measuring import measure
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.pool.peers import without_peer_access

from .section import NEEDS_CARD, NEEDS_SEVERAL, Section, milliseconds

PACKAGES = ("flash-attn", "sageattention", "triton", "xformers", "comfy-kitchen", "safetensors", "transformers", "diffusers")
DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
IDLE, BUSY = 3.0, 1.0  # seconds; clocks fall and rise within them
EXCHANGE = 3 * 4608 * 24 * 128  # numbers: queries, keys and values of a Flux attention
KILLS = 5
BACK_IN = 5.0  # seconds
HELD = 4 << 30  # bytes of the process that is killed
LOAD = f"""
import torch
held = torch.zeros({HELD}, dtype=torch.uint8, device="cuda")
x = torch.randn(8192, 8192, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    x = torch.nn.functional.normalize(x @ x)
"""


def environment(section: Section) -> None:
    """What the machine has: one result per kind of thing."""
    memory = round(psutil.virtual_memory().total / 1e9)
    section.add("computer", cores=os.cpu_count(), memory_GB=memory, machine=platform.machine(), python=platform.python_version())
    section.add("torch", version=torch.__version__, cuda=torch.version.cuda or "none")
    section.add("ComfyUI", version=families.version() or "unknown")
    section.add("packages", **{name: _version(name) for name in PACKAGES})
    with section.part("libraries"):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        section.add("libraries", nccl=version, cudnn=str(torch.backends.cudnn.version()), driver=_driver())
    cards = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for name in cards:
        card, (free, total) = torch.cuda.get_device_properties(name), torch.cuda.mem_get_info(name)
        capability = f"{card.major}.{card.minor}"
        section.add(name, name=card.name, memory_GB=total / 1e9, free_GB=free / 1e9, capability=capability)
    if len(cards) == 1:
        section.add("peer-to-peer", NEEDS_SEVERAL)
    else:
        section.add("peer-to-peer", pairs=len(cards) * (len(cards) - 1), without=without_peer_access(cards))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(package.replace("-", "_")) else "none"


def _driver() -> str:
    """The driver's version, from the tool that comes with it."""
    try:
        return subprocess.run(DRIVER, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def nccl(section: Section) -> None:
    """NCCL with one rank, what `measure` says of a card that idles, and whether the memory of a killed process comes back.

    The collectives are those of `engine/ranks/collectives.py`: messages to itself, uneven and empty ones too, also in groups that
    were split off.
    """
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    with section.part("collectives of one rank"), _joined(section, device):
        _collectives(section, device)
        _speeds(section, device)
    with section.part("memory of killed processes"):
        if section.rehearse:
            section.add("memory of killed processes", NEEDS_CARD)
        else:
            _kills(section)


@contextlib.contextmanager
def _joined(section: Section, device: torch.device) -> Iterator[None]:
    """A process group of this process alone, connected at once."""
    began = time.monotonic()
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device)
    try:
        section.add("start with a device", seconds=time.monotonic() - began)
        yield
    finally:
        dist.destroy_process_group()


def _collectives(section: Section, device: torch.device) -> None:
    began = time.monotonic()
    split, _ = dist.new_subgroups_by_enumeration([[0]], backend="nccl")
    dist.barrier(split)
    section.add("a group that is split off", seconds=time.monotonic() - began)
    control, sent = dist.new_group(backend="gloo"), torch.arange(3)
    dist.broadcast(sent, 0, group=control)
    section.check("a group of gloo beside it", sent.tolist() == [0, 1, 2])
    for name, group in (("all", dist.group.WORLD), ("split group", split)):
        for count in (0, 1, 777, 1 << 22):
            send = torch.arange(count, dtype=torch.float32, device=device).view(torch.uint8)
            received, whole = torch.zeros_like(send), torch.zeros_like(send)
            operations = [dist.P2POp(dist.isend, send, 0, group=group), dist.P2POp(dist.irecv, received, 0, group=group)]
            for work in dist.batch_isend_irecv(operations) if count else ():
                work.wait()
            dist.all_to_all_single(whole, send, [len(send)], [len(send)], group=group)
            good = torch.equal(whole, send) and (torch.equal(received, send) or not count)
            section.check(f"messages to itself, {name}, {count} numbers", good)


def _speeds(section: Section, device: torch.device) -> None:
    """What an exchange costs the host; what is measured at the clocks of a card that idles, and of one that was at work."""
    mesh = SequenceMesh(dist.group.WORLD)
    send, received = (torch.zeros(EXCHANGE, dtype=torch.bfloat16, device=device) for _ in range(2))
    exchange = partial(mesh.whole.all_to_all, send, [EXCHANGE], received, [EXCHANGE])
    section.add("an exchange", **milliseconds(lambda: exchange().wait()))
    matrix = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=device)
    for state in ("idle", "busy"):
        torch.cuda.synchronize()
        if not section.rehearse:
            began = time.monotonic()
            time.sleep(IDLE if state == "idle" else 0)
            while state == "busy" and time.monotonic() - began < BUSY:
                torch.mm(matrix, matrix)
                torch.cuda.synchronize()
        (rates,) = measure(mesh, device).each
        section.add(f"measured after it was {state}", TFLOPS=rates.flops / 1e12, GB_per_second=rates.memory / 1e9)


def _kills(section: Section) -> None:
    """Kill a process in the middle of its kernels, again and again, and wait for its memory."""
    torch.cuda.synchronize()
    slowest, missing, kills = 0.0, 0, 2 if section.few else KILLS
    before = torch.cuda.mem_get_info()[0]
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True)
        if process.stdout is None or process.stdout.readline().strip() != "ready":
            raise RuntimeError("the process that was to be killed did not start")
        time.sleep(0.2)
        began = time.monotonic()
        process.kill()
        process.wait()
        while torch.cuda.mem_get_info()[0] < before - (64 << 20) and time.monotonic() - began < 2 * BACK_IN:
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - began)
        missing = max(missing, before - torch.cuda.mem_get_info()[0])
    section.check("memory of killed processes", slowest <= BACK_IN, kills=kills, slowest_seconds=slowest, missing_MB=missing / 1e6)
