"""`make play`: what it prints is true, the workflow runs, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.server import CHECKOUT


def fetch(url, data=None):
    with urllib.request.urlopen(url, None if data is None else json.dumps(data).encode(), timeout=10) as answer:
        return json.load(answer)


def test_the_workflow_runs(comfyui_path, tmp_path):
    command = [sys.executable, str(CHECKOUT / ".ci" / "play.py")]
    env = {"COMFYUI_PATH": str(comfyui_path), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        said = ""
        while not said.endswith("Ctrl-C ends it.\n"):
            line = process.stdout.readline()
            assert line, f"it ended with status {process.wait(30)}"
            said += line
        url, workflow = re.search(r"(http://127.0.0.1:\d+)/", said)[1], re.search(r"\S+\.json", said)[0]
        prompt = json.loads(Path(workflow).read_text())
        prompt["sampler"]["inputs"]["steps"] = 3
        prompt_id = fetch(f"{url}/prompt", {"prompt": prompt})["prompt_id"]
        for _ in range(600):
            history = fetch(f"{url}/history/{prompt_id}")
            if history:
                break
            time.sleep(0.2)
        (entry,) = history.values()
        assert entry["status"]["status_str"] == "success", entry["status"]
        assert len(entry["outputs"]["report"]["images"]) == 1
        assert len(fetch(f"{url}/context_parallel/status")["ranks"]) == 2
    finally:
        process.send_signal(signal.SIGINT)  # a kill would leave its server behind
        status = process.wait(30)
    assert status == 0
    assert [path for path in tmp_path.iterdir() if path.name.startswith(("context-parallel-play-", "comfy-server-"))] == []
    with pytest.raises(OSError, match="refused"):
        fetch(url)
