"""Lets this computer work for the ComfyUI of another one: `python join.py <code>`, in ComfyUI's folder, until Ctrl-C.

The code is what ComfyUI shows on the other computer. Options: `--name pc2`, what this computer is called there; all others
are ComfyUI's own, such as `--cpu`. The file is also the program of the processes that this starts: `join.py --agent` is torch
elastic's agent, `join.py --relay` what it runs.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "cp_runtime"
SPEC = "CP_MACHINE"
"""Environment variable with the spec of an agent and its relay, as JSON: other users cannot read it."""


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
    if sys.argv[1:] == ["--agent"]:
        module("elastic").run(json.loads(os.environ[SPEC]))
    elif sys.argv[1:] == ["--relay"]:
        module("relay").run(json.loads(os.environ[SPEC]))
    else:
        module("joining").main(sys.argv[1:])


if __name__ == "__main__":
    main()
