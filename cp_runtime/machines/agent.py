"""Starts this machine's agent of torch elastic in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..pool.fork_server import die_with_parent

PROGRAM = str(Path(__file__).with_name("join.py"))
SPEC = "CP_MACHINE"
"""Environment variable with the spec of a child that runs `join.py`, as JSON: other users cannot read it."""
OVER = 75
"""Exit status of an agent whose work is over, or was interrupted: another one may be started."""


def start_agent(role: str, spec: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
    """Start an agent as a child, which ends when this thread does. `role`: of `join.py`."""
    environment, command = {**os.environ, **for_child(spec)}, [sys.executable, "-u", PROGRAM, role]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options)


def for_child(spec: dict[str, Any]) -> dict[str, str]:
    """Return what a child that runs `join.py` needs in its environment."""
    return {SPEC: json.dumps({**spec, "parent": os.getpid()})}


def as_child() -> dict[str, Any]:
    """Return the spec of this process. From here on it ends with its parent."""
    spec: dict[str, Any] = json.loads(os.environ[SPEC])
    die_with_parent(spec["parent"])
    return spec
