"""Starts this machine's agent of torch elastic, which is `elastic.run` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).with_name("join.py"))
SPEC = "CP_MACHINE"
"""Environment variable with the spec of an agent and its relay, as `join.py` has it."""
AGENT = "CP_MACHINE_AGENT"
"""Environment variable with the agent's process id, for its relay."""


def start_agent(spec: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
    """Start an agent as a child, which ends when this thread does."""
    environment = {**os.environ, SPEC: json.dumps({**spec, "parent": os.getpid()})}
    command = [sys.executable, "-u", PROGRAM, "--agent"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options)
