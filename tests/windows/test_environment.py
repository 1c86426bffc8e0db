"""What the port stands on: torch's gloo, and ComfyUI's server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

ALL_REDUCE = """
import datetime, sys
import torch
import torch.distributed as dist

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
value = torch.full((3,), rank + 1.0)
dist.all_reduce(value)
dist.destroy_process_group()
print(value.tolist())
"""


def test_this_is_windows():
    assert os.name == "nt"
    assert sys.platform == "win32"
    assert torch.distributed.is_gloo_available()


def test_two_processes_reduce_over_gloo(tmp_path):
    programs = [
        subprocess.Popen([sys.executable, "-c", ALL_REDUCE, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [program.communicate(timeout=120)[0].strip() for program in programs] == ["[3.0, 3.0, 3.0]"] * 2


@pytest.fixture
def server(tmp_path):
    """The address of a server that has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--cpu", "--port", str(port), "--base-directory", str(tmp_path), "--database-url", "sqlite:///:memory:")
    comfyui = Path(os.environ["COMFYUI_PATH"])
    (tmp_path / "custom_nodes").mkdir()
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([sys.executable, str(comfyui / "main.py"), *options], stdout=log, stderr=log)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_comfyui_serves(server, tmp_path):
    process, address = server
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ends = time.monotonic() + 240
    while True:
        try:
            with opener.open(f"{address}/system_stats", timeout=5) as answer:
                stats = json.load(answer)
            break
        except OSError:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < ends, (tmp_path / "log").read_text()
            time.sleep(0.5)
    assert stats["system"]["os"] == "win32"
    assert [device["type"] for device in stats["devices"]] == ["cpu"]
