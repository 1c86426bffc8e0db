"""Lets this computer work for the ComfyUI of another one: `python join.py <code>`, in ComfyUI's folder, until Ctrl-C.

The code is what ComfyUI shows on the other computer. Options: `--name pc2`, what this computer is called there; all others
are ComfyUI's own, such as `--cpu`. The file is also the program of the other processes, see `ROLES`. This one keeps another running
that joins, as long as trying again may help, and imports nothing but Python's own modules.
"""

import importlib
import importlib.util
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

PACKAGE = "cp_runtime"
ROLES = {"--join": "joining", "--agent": "elastic", "--relay": "relay"}
"""By option, the module that is run: on a machine that joins, as agent on ComfyUI's, as what agents start."""


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
    return importlib.import_module(f"{PACKAGE}.machines.{name}")


def main() -> None:
    agent = module("agent")
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        module(ROLES[sys.argv[1]]).run(agent.as_child())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked = {"argv": sys.argv, "typed": sys.stdin.readline() if "-" in sys.argv[1:] else ""}
    while (status := agent.start_agent("--join", asked).wait()) == agent.OVER or status < 0:
        sys.stdout.write("the work for ComfyUI is over, or was interrupted. Trying again.\n")
        sys.stdout.flush()
        time.sleep(1)
    sys.exit(status)


if __name__ == "__main__":
    main()
