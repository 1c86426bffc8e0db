"""What only a GPU can show: kernels, modes, NCCL, ComfyUI, memory, faults and time, in groups of nine minutes at most.

    make gpu-check, or COMFYUI_PATH=... python benchmarks/gpu_check.py --out DIR [--rehearse] [--few] [--sections first vae]

Writes a line of JSON per result to DIR/results.jsonl as soon as it is there, and DIR/gpu.md from them; results of other sections
stay there. Every section is a process of its own with a time limit: one that fails or hangs does not stop the next. Nothing is
installed or downloaded. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu_sections import GROUPS, SECTIONS, runner
from gpu_sections.section import Section
from support import stand_in

REHEARSAL = 2.0  # times its limit that a section may take there: a CPU has less to give
WITHOUT_CUDA = "torch sees no CUDA device. With --rehearse the sections run on fake ones, as far as they can."
BY_SERVER = ("comfy", "vae", "faults")  # they ask a server, and are the same lines on any device


def planned(arguments: argparse.Namespace, out: Path) -> list[runner.Planned]:
    """The sections that were asked for, each once."""
    flags = [f"--{name}" for name in ("rehearse", "few") if getattr(arguments, name)]
    limits = arguments.limits * (REHEARSAL if arguments.rehearse else 1)
    return [
        runner.Planned(
            name=name,
            seconds=SECTIONS[name] * limits,
            command=(__file__, "--inside", name, "--out", str(out), "--limits", str(arguments.limits), *flags),
        )
        for name in dict.fromkeys(itertools.chain.from_iterable(GROUPS.get(name, (name,)) for name in arguments.sections))
    ]


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
        path = out / runner.RESULTS
        section = Section(name=name, path=path, rehearse=rehearse, few=few, limits=arguments.limits, device=device)
        importlib.import_module(f"gpu_sections.{name}").run(section)
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
    good = runner.run(planned(arguments, out), out)
    print(f"\n{(out / runner.TABLE).read_text()}\n{out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
