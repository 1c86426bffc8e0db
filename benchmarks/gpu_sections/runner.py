"""Runs sections one after the other, each in a process of its own, and writes the table."""

from __future__ import annotations

import importlib
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

from .options import Options
from .results import BAD, FAILED, OK, TIMED_OUT, WHOLE, Results, read
from .table import markdown

RESULTS, TABLE = "results.jsonl", "gpu.md"
MARKER = "CP_GPU_CHECK"
"""Environment variable that every process of a section inherits, by which those that it leaves behind are found."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section to run.

    Args:
        seconds: that it may take.
        command: what the interpreter gets to run it: a file and arguments.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def run(sections: Sequence[Section], out: Path) -> bool:
    """Run sections and write their results to `out`, where those of others stay. Returns whether nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    path, names = out / RESULTS, [section.name for section in sections]
    kept = [line for line in read(path) if line["section"] not in names]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    for section in sections:
        print(f"{section.name} …", end="", flush=True)
        began = time.monotonic()
        result, reason = _run(section, out)
        seconds = time.monotonic() - began
        Results(path, section.name).add(WHOLE, result, seconds=round(seconds, 1), **({"reason": reason} if reason else {}))
        (out / TABLE).write_text(markdown(read(path)))
    return not any(line["result"] in BAD for line in read(path) if line["section"] in names)


def run_inside(name: str, results: Path, options: Options) -> int:
    """Run a section in this process."""
    importlib.import_module(f"{__package__}.{name}").run(options, Results(results, name))
    return 0


def _run(section: Section, out: Path) -> tuple[str, str]:
    """How a section ended, and why if not well."""
    log, marker = out / f"{section.name}.log", uuid.uuid4().hex
    temporary = tempfile.TemporaryDirectory(prefix="context-parallel-gpu-")
    with log.open("wb") as output, open(os.devnull, "rb") as nothing, temporary as folder:
        environment = {**os.environ, MARKER: marker, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        files = (nothing.fileno(), output.fileno(), output.fileno())
        process = preloaded.start(section.command, cwd=Path.cwd(), env=environment, files=files)
        try:
            code = process.wait(section.seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"ended after {section.seconds:.0f} s; the last lines: {_last_lines(log)}"
        finally:
            _end(process, marker)
    if code == 0:
        return OK, ""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return FAILED, f"{how}; the last lines: {_last_lines(log)}"


def _end(process: preloaded.Process, marker: str) -> None:
    """Kill a section that still runs, and whatever it left behind."""
    if process.poll() is None:
        process.kill()
    process.wait()
    left = processes.with_environment(MARKER, marker)
    processes.kill_all(left)
    processes.wait_gone(left, 5.0)


def _last_lines(log: Path, count: int = 3) -> str:
    return " | ".join([line for line in log.read_text(errors="replace").splitlines() if line.strip()][-count:])
