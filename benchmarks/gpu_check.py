"""What only a GPU can show: kernels, modes, NCCL, ComfyUI, memory, faults and time, in groups of nine minutes at most.

    make gpu-check, or COMFYUI_PATH=... python benchmarks/gpu_check.py --out DIR [--rehearse] [--few] [--sections first vae]

Writes a line of JSON per result to DIR/results.jsonl as soon as it is there, and DIR/gpu.md from them; results of other sections
stay there. Every section is a process of its own with a time limit: one that fails or hangs does not stop the next. Nothing is
installed or downloaded. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu_sections import GROUPS, SECTIONS, function_of
from gpu_sections.section import FAILED, OK, TIMED_OUT, WHOLE, Section, markdown, read, verdict
from support import preloaded, processes, stand_in

RESULTS, TABLE = "results.jsonl", "gpu.md"
MARKER = "CP_GPU_CHECK"
"""Environment variable that every process of a section inherits, by which those that it leaves behind are found."""
REHEARSAL = 2.0  # times its limit that a section may take there: a CPU has less to give
WITHOUT_CUDA = "torch sees no CUDA device. With --rehearse the sections run on fake ones, as far as they can."
BY_SERVER = ("comfy", "vae", "faults")  # they ask a server, and are the same lines on any device

Planned = tuple[float, Sequence[str]]
"""A section to run: the seconds that it may take, and what the interpreter gets to run it, a file and arguments."""


def planned(arguments: argparse.Namespace, out: Path) -> dict[str, Planned]:
    """The sections that were asked for, by name."""
    flags = [f"--{name}" for name in ("rehearse", "few") if getattr(arguments, name)]
    names = itertools.chain.from_iterable(GROUPS.get(name, (name,)) for name in arguments.sections)
    limits = arguments.limits * (REHEARSAL if arguments.rehearse else 1)
    common = ("--out", str(out), "--limits", str(arguments.limits), *flags)
    return {name: (SECTIONS[name] * limits, (__file__, "--inside", name, *common)) for name in names}


def run(sections: Mapping[str, Planned], out: Path) -> bool:
    """Run sections and write their results to `out`, where those of others stay. Returns whether nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / RESULTS
    kept = [line for line in read(path) if line["section"] not in sections]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    for name, section in sections.items():
        print(f"{name} …", end="", flush=True)
        began = time.monotonic()
        result, reason = run_one(*section, out / f"{name}.log")
        if result == OK:
            result, reason = verdict(line for line in read(path) if line["section"] == name)
        seconds = round(time.monotonic() - began, 1)
        Section(name=name, path=path).add(WHOLE, result, seconds=seconds, **({"reason": reason} if reason else {}))
        (out / TABLE).write_text(markdown(read(path)))
    return not any(line["result"] in (FAILED, TIMED_OUT) for line in read(path) if line["section"] in sections)


def run_one(limit: float, command: Sequence[str], log: Path) -> tuple[str, str]:
    """How a section ended, and why if not well. Whatever it left behind is killed."""
    marker, temporary = uuid.uuid4().hex, tempfile.TemporaryDirectory(prefix="context-parallel-gpu-")
    with log.open("wb") as output, open(os.devnull, "rb") as nothing, temporary as folder:
        environment = {**os.environ, MARKER: marker, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        files = (nothing.fileno(), output.fileno(), output.fileno())
        process = preloaded.start(command, cwd=Path.cwd(), env=environment, files=files)
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            left = processes.with_environment(MARKER, marker)
            processes.kill_all(left)
            processes.wait_gone(left, 5.0)
    if code == 0:
        return OK, ""
    how = f"ended after {limit:.0f} s" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return TIMED_OUT if code is None else FAILED, f"{how}; the last lines: {' | '.join(said[-3:])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where results.jsonl, gpu.md and the sections' logs go; a new folder by default")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, computed by the CPU for fake CUDA devices")
    parser.add_argument("--few", action="store_true", help="few cases of each section: to see whether the command works")
    named = ", ".join(f"{name} ({' '.join(sections)})" for name, sections in GROUPS.items())
    names = (*GROUPS, *SECTIONS)
    parser.add_argument("--sections", nargs="+", choices=names, default=list(GROUPS), metavar="NAME", help=f"or groups: {named}")
    parser.add_argument("--limits", type=float, default=1.0, metavar="TIMES", help="as long as usual that sections may take")
    parser.add_argument("--inside", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out: Path = arguments.out or Path(tempfile.mkdtemp(prefix="context-parallel-gpu-"))
    rehearse, few, name = arguments.rehearse, arguments.few, arguments.inside
    if not os.environ.get("COMFYUI_PATH"):
        sys.exit("COMFYUI_PATH is not set: run `make gpu-check`, or set it to ComfyUI's folder.")
    if name:
        # What is compiled for a card is nothing that a CPU could stand in for; and a server starts sooner without cards.
        device = "cpu" if rehearse and (name == "compiled" or (few and name in BY_SERVER)) else "cuda:0"
        limits = arguments.limits
        function_of(name)(Section(name=name, path=out / RESULTS, rehearse=rehearse, few=few, limits=limits, device=device))
        return 0
    if rehearse:
        from support.server import DETECTION  # needs packages that a section may do without

        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of torch spin where cores are taken
        out.mkdir(parents=True, exist_ok=True)
        os.environ |= stand_in.environment(stand_in.Cards(count=2, ledger=out.resolve() / "cards"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(DETECTION), os.environ.get("PYTHONPATH", ""))))
    else:
        import torch

        if not torch.cuda.is_available():
            sys.exit(WITHOUT_CUDA)
    good = run(planned(arguments, out), out)
    print(f"\n{(out / TABLE).read_text()}\n{out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
