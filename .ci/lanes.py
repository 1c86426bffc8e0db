"""Runs all tests, several jobs side by side: most tests wait for something, and one alone leaves a core idle.

    make test, or python .ci/lanes.py [--quick] [--lanes 2]

A job is one run of pytest, so its tests share what pytest shares in a session, such as the server and its workers. A lane takes the
next job as soon as it is free. Ends with the failures, a line per job and the time per folder, file and
test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support import durations, preloaded, shared_models
from support.chromium import CHROMIUM, MISSING

# `python -m pytest` would put the checkout on sys.path, where the folder nodes/ hides ComfyUI's nodes.py.
PYTEST = str(Path(pytest.__file__).with_name("__main__.py"))
NOTHING_SELECTED = 5
"""pytest's status where no test was there to run."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command.

    Args:
        paths: what pytest runs, files or folders. A file belongs to the job that names it, else to the one that names its folder.
        options: for pytest.
        command: another command than pytest.
    """

    name: str
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def arguments(self, others: Iterable[Job]) -> list[str]:
        """What the interpreter gets to run pytest, without files that other jobs name."""
        paths = [path for job in others for path in job.paths]
        inside = [path for path in paths if any(path.startswith(f"{mine}/") for mine in self.paths)]
        return [PYTEST, *self.paths, *(f"--ignore={path}" for path in inside), *self.options]


def files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


LINT = Job(name="lint", command=("make", "-k", "lint"))
# The longest first. Few: every job has a session of pytest, checkpoints, servers and a copy that ranks are forked from.
JOBS = (
    Job(name="ranks", paths=("tests/ranks",)),
    Job(name="server", paths=("tests/server",)),
    Job(name="faults", paths=("tests/faults",)),
    Job(
        name="pool",
        paths=files("server", "compiled", "hosts", "lifecycle", "pipefusion", "status", "upscale_life", "vae_life", "weights"),
    ),
    Job(name="cards", paths=files("server", "accelerators", "alone", "cards", "dynamic_vram", "gguf", "hidden_cards")),
    Job(name="browser", paths=("tests/browser",)),
    Job(name="owners", paths=files("faults", "beyond", "leaks", "neighbours", "parent", "pool")),
    Job(
        name="graphs",
        paths=files(
            "server",
            *("nodes", "conditioning_nodes", "template_nodes", "template_videos", "template_files"),
            *("families", "workflows", "blueprint"),
        ),
    ),
    Job(name="tables", paths=("tests/families", "tests/gpu", "tests/machines", "tests/windows", "tests/wine")),
    Job(name="unit", paths=("tests/unit",)),
    LINT,
)
# One prompt per mode, and what needs no ComfyUI.
QUICK = (Job(name="modes", paths=files("server", "parity"), options=("-m", "quick")), Job(name="unit", paths=("tests/unit",)), LINT)


@dataclass
class Outcome:
    """How a job ended, and what it printed."""

    job: Job
    status: int
    seconds: float
    lines: list[str] = field(repr=False)

    @property
    def failed(self) -> bool:
        return self.status not in (0, NOTHING_SELECTED)

    @property
    def verdict(self) -> str:
        """The last line that says something: of pytest, how many tests passed and failed."""
        said = [line for line in self.lines if line.strip("= ")]
        return said[-1].strip("= ") if said else f"status {self.status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part that takes about a minute: lint, unit, one prompt per mode")
    parser.add_argument(
        "--lanes", type=int, default=min(4, 1 + (os.cpu_count() or 1)), help="jobs at a time; by default one more than cores"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Not to write bytecode is meant for images that run a program once; here hundreds of processes would compile this package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # More ranks than cores: gloo's event thread spins while the thread that holds its connection's lock is not running, and a
    # thread that is woken takes the core from that very thread. Here it waits for its turn, in all that is started from here.
    with contextlib.suppress(AttributeError, OSError):  # other systems have no such policy, or do not let one choose
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    jobs = QUICK if options.quick else JOBS
    began = time.monotonic()
    psutil.cpu_percent()  # the next one is of the time since this one
    with tempfile.TemporaryDirectory(prefix="context-parallel-tests-") as folder:
        figures = Path(folder) / "durations"
        figures.touch()
        with contextlib.ExitStack() as stack:
            os.environ.update(stack.enter_context(preloaded.running(Path(folder))))
            environment = {"CP_TEST_DURATIONS": str(figures), shared_models.VARIABLE: str(Path(folder) / "models")}
            outcomes = run(jobs, options.lanes, environment)
        table = durations.table(durations.read(figures))
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        say(f"\n===== {outcome.job.name}", *outcome.lines)
    busy = psutil.cpu_percent() / 100  # of the whole machine: most of what works here is no child of this process
    say("", *table, "Jobs:")
    say(*(f"{outcome.seconds:8.1f} s  {outcome.job.name}: {outcome.verdict}" for outcome in outcomes))
    seconds = time.monotonic() - began
    say(f"{seconds:8.1f} s  in all, {options.lanes} lanes, {busy:.0%} of {os.cpu_count()} cores busy")
    line, status = ending([outcome.job.name for outcome in failed], bool(CHROMIUM) or options.quick)
    say(line)
    return status


def ending(failed: list[str], had_browser: bool, in_ci: bool = os.environ.get("CI") == "true") -> tuple[str, int]:
    """Return the last line, and the exit status. `failed`: jobs. Nobody looks at what a CI run has left out: there it fails."""
    if failed:
        return f"FAILED: {', '.join(failed)}", 1
    if had_browser:
        return "all passed", 0
    left_out = f"the tests in a browser did not run ({MISSING})"
    return (f"FAILED: {left_out}", 1) if in_ci else (f"all passed, but {left_out}", 0)


def run(jobs: tuple[Job, ...], lanes: int, environment: dict[str, str]) -> list[Outcome]:
    """Run jobs, `lanes` of them at a time, with more variables in their environment."""
    running: list[preloaded.Process] = []

    def job_of(job: Job) -> Outcome:
        return run_job(job, [other for other in jobs if other is not job], environment, running)

    with ThreadPoolExecutor(lanes) as pool:
        try:
            return list(pool.map(job_of, jobs))
        except BaseException:  # Ctrl-C, or the end that the system asks for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.send_signal(signal.SIGINT)  # pytest ends what its fixtures have started
            raise


def run_job(job: Job, others: list[Job], environment: dict[str, str], running: list[preloaded.Process]) -> Outcome:
    """Run one job, and show its progress: pytest's lines of dots, one per file."""
    began = time.monotonic()
    env = {**os.environ, **environment}
    printed, output = os.pipe()
    with open(os.devnull, "rb") as nothing, os.fdopen(output, "wb"):
        process: preloaded.Process
        if job.command:
            process = subprocess.Popen(job.command, cwd=ROOT, env=env, stdin=nothing, stdout=output, stderr=output)
        else:
            process = preloaded.start(
                job.arguments(others),
                cwd=ROOT,
                env=env,
                files=(nothing.fileno(), output, output),
                ranks=True,
            )
    running.append(process)
    lines = []
    with open(printed, errors="replace") as reader:
        for line in reader:
            lines.append(line.rstrip())
            if job.command or re.match(r"\S+\.py [.FEsxX]", line):
                say(f"{job.name:>8} | {lines[-1]}")
    outcome = Outcome(job, process.wait(), time.monotonic() - began, lines)
    say(f"{job.name:>8} | {'FAILED' if outcome.failed else 'done'} after {outcome.seconds:.0f} s")
    return outcome


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
