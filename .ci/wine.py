"""Run programs of Windows under Wine, each on a computer of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

RUNTIME = (
    "msvcp140", "msvcp140_1", "msvcp140_2", "msvcp140_atomic_wait", "vcruntime140", "vcruntime140_1", "concrt140",
)  # fmt: skip
OVERRIDES = f"{','.join(RUNTIME)}=n,b;mscoree,mshtml=;winemenubuilder.exe=d"
"""Microsoft's C++ library instead of Wine's, and nothing of .NET, a browser, or menus."""
PR_SET_CHILD_SUBREAPER = 36
TIMED_OUT = 124
"""Status of a program that took too long, as `timeout` has it."""


def variables(folder: Path, prefix: Path) -> dict[str, str]:
    """Environment variables of what runs on the computer in `prefix`."""
    programs = folder / "wine" / "usr" / "lib" / "wine"
    return {
        "WINEDEBUG": "-all",  # unless the caller wants to know
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "DISPLAY"))},
        "HOME": str(prefix),
        "LD_LIBRARY_PATH": str(folder / "wine" / "usr" / "lib" / "x86_64-linux-gnu"),
        "WINEARCH": "win64",
        "WINEDLLOVERRIDES": OVERRIDES,
        "WINELOADER": str(programs / "wine64"),
        "WINEPREFIX": str(prefix),
        "WINESERVER": str(programs / "wineserver"),
        "KMP_AFFINITY": "disabled",  # OpenMP asks for the processors of a NUMA node, with a function that Wine 8 lacks
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def computer(folder: Path) -> Iterator[dict[str, str]]:
    """Variables for a fresh computer. Its registry, users and temporary files are its own; of Windows itself there is one."""
    with tempfile.TemporaryDirectory(prefix="context-parallel-windows-") as own:
        prefix = Path(own) / "prefix"
        shutil.copytree(folder / "prefix", prefix, symlinks=True, ignore=shutil.ignore_patterns("windows", "wineserver"))
        (prefix / "drive_c" / "windows").symlink_to(folder / "prefix" / "drive_c" / "windows")
        yield variables(folder, prefix)


def install(folder: Path) -> None:
    """Make the computer that all others are copies of."""
    prefix = folder / "prefix"
    system, users = (prefix / "drive_c" / name for name in ("windows/system32", "users"))
    system.mkdir(parents=True)
    # Debian's Wine needs it to start, and finds it where Debian installs it only.
    shutil.copy(folder / "wine" / "usr" / "x86_64-w64-mingw32" / "lib" / "zlib1.dll", system)
    environment = variables(folder, prefix)
    try:
        start(environment, environment["WINELOADER"], "wineboot", "-i", output=subprocess.DEVNULL).wait(300)
        subprocess.run([environment["WINESERVER"], "-w"], env=environment, check=True, timeout=60)
    finally:
        end(environment)
    if not (prefix / "system.reg").is_file():
        sys.exit("Wine did not start")
    for link in filter(Path.is_symlink, users.glob("*/*")):  # to the home folder here
        link.unlink()
        link.mkdir()


def adopt() -> None:
    """Have this process wait for Wine's services, which are nobody's children. On many a container nobody else does."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(environment: Mapping[str, str], *program: str, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def end(environment: Mapping[str, str]) -> None:
    """End Wine's server and thereby all programs. Returns when none of them is left."""
    subprocess.run([environment["WINESERVER"], "-k"], env=environment, check=False)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def run_python(folder: Path, *arguments: str, timeout: float, **more: str) -> int:
    """Run Windows' Python in this folder, pass on what it prints, and return its status. All that it started ends with it.

    Args:
        arguments: for the interpreter. Paths may be those of this system.
        timeout: in seconds.
        more: environment variables.
    """
    with computer(folder) as environment:
        environment |= {name: translated(value) for name, value in more.items()}
        python = str(folder / "python" / "python.exe")
        # A pipe: under Wine, Python refuses a file. Services have it too, so it ends with the last of them.
        process = start(environment, environment["WINELOADER"], python, *map(translated, arguments), output=subprocess.PIPE)
        assert process.stdout is not None
        reader = threading.Thread(target=pass_on, args=(process.stdout,))
        reader.start()
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"[windows] ended after {timeout:g} s\n")
            return TIMED_OUT
        finally:
            end(environment)
            reader.join()


def translated(text: str) -> str:
    """A path as Windows has it, if it is an absolute one of this system."""
    return "Z:" + text.replace("/", "\\") if text.startswith("/") and os.path.exists(text) else text


def pass_on(output: IO[bytes]) -> None:
    for line in output:
        sys.stdout.buffer.write(line.replace(b"\r\n", b"\n"))
        sys.stdout.buffer.flush()
