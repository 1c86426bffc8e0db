"""Lets this computer work for the ComfyUI of another one: `python join.py <code>`, in ComfyUI's folder, until Ctrl-C.

The code is what ComfyUI shows on the other computer. Options: `--name pc2`, what this computer is called there; all others
are ComfyUI's own, such as `--cpu`. The file is also the program of the other processes, see `ROLES`. This one keeps another running
that joins, as long as trying again may help, and imports nothing but Python's own modules.
"""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM, PACKAGE = str(Path(__file__).resolve()), "cp_runtime"
ROLES = {"--join": "joining", "--agent": "elastic", "--relay": "relay"}
"""By option, the module that is run: on a machine that joins, as agent on ComfyUI's, as what agents start."""
SPEC = "CP_MACHINE"
"""Environment variable with the spec of a child that runs this file, as JSON: other users cannot read it."""
OVER = 75
"""Exit status of an agent whose work is over, or was interrupted: another one may be started."""


def start_agent(role: str, spec: dict[str, Any], **options: Any) -> "subprocess.Popen[str]":
    """Start an agent of torch elastic as a child, which ends when this thread does. `role`: of ROLES."""
    environment, command = {**os.environ, **for_child(spec)}, [sys.executable, "-u", PROGRAM, role]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options)


def for_child(spec: dict[str, Any]) -> dict[str, str]:
    """Return what a child that runs this file needs in its environment."""
    return {SPEC: json.dumps({**spec, "parent": os.getpid()})}


def as_child() -> dict[str, Any]:
    """Return the spec of this process. From here on it ends with its parent."""
    spec: dict[str, Any] = json.loads(os.environ[SPEC])
    module("pool.fork_server").die_with_parent(spec["parent"])
    return spec


def module(name: str) -> ModuleType:
    """Import a module of the package from this file's place, without the folder above it on `sys.path`, which has a `nodes/`."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    if PACKAGE not in sys.modules:
        folder = here.parent
        spec = importlib.util.spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {folder}")
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}")


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        spec = as_child()
        module(f"machines.{ROLES[sys.argv[1]]}").run(spec)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked = {"argv": sys.argv, "typed": sys.stdin.readline() if "-" in sys.argv[1:] else ""}
    while (status := start_agent("--join", asked).wait()) == OVER or status < 0:
        sys.stdout.write("the work for ComfyUI is over, or was interrupted. Trying again.\n")
        sys.stdout.flush()
        time.sleep(1)
    sys.exit(status)


if __name__ == "__main__":
    main()
