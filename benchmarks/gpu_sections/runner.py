"""Runs sections one after the other, each in a process of its own, and writes the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import preloaded, processes

from .section import FAILED, OK, TIMED_OUT, WHOLE, Section, markdown, read

RESULTS, TABLE = "results.jsonl", "gpu.md"
MARKER = "CP_GPU_CHECK"
"""Environment variable that every process of a section inherits, by which those that it leaves behind are found."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A section to run.

    Args:
        seconds: that it may take.
        command: what the interpreter gets to run it: a file and arguments.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def run(sections: Sequence[Planned], out: Path) -> bool:
    """Run sections and write their results to `out`, where those of others stay. Returns whether nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    path, names = out / RESULTS, [section.name for section in sections]
    kept = [line for line in read(path) if line["section"] not in names]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    for section in sections:
        print(f"{section.name} …", end="", flush=True)
        began = time.monotonic()
        result, reason = _run(section, out)
        seconds = round(time.monotonic() - began, 1)
        Section(name=section.name, path=path).add(WHOLE, result, seconds=seconds, **({"reason": reason} if reason else {}))
        (out / TABLE).write_text(markdown(read(path)))
    return not any(line["result"] in (FAILED, TIMED_OUT) for line in read(path) if line["section"] in names)


def _run(section: Planned, out: Path) -> tuple[str, str]:
    """How a section ended, and why if not well. Whatever it left behind is killed."""
    log, marker = out / f"{section.name}.log", uuid.uuid4().hex
    temporary = tempfile.TemporaryDirectory(prefix="context-parallel-gpu-")
    with log.open("wb") as output, open(os.devnull, "rb") as nothing, temporary as folder:
        environment = {**os.environ, MARKER: marker, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        files = (nothing.fileno(), output.fileno(), output.fileno())
        process = preloaded.start(section.command, cwd=Path.cwd(), env=environment, files=files)
        code = None
        try:
            code = process.wait(section.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            left = processes.with_environment(MARKER, marker)
            processes.kill_all(left)
            processes.wait_gone(left, 5.0)
    if code == 0:
        return OK, ""
    how = f"ended after {section.seconds:.0f} s" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return TIMED_OUT if code is None else FAILED, f"{how}; the last lines: {' | '.join(said[-3:])}"
