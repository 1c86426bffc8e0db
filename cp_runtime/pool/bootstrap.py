"""First code of a worker rank: tie its life to the parent, then load the package and run the worker.

Run by file name, as `python bootstrap.py <spec as JSON>`. Nothing heavy is imported before the process is armed. The folder of
this file leaves `sys.path` at once: its modules would shadow others.
"""

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, death_pipe: int) -> None:
    """End this process when the parent ends, whatever ends it and whatever this process is doing then.

    The kernel's signal works even while C code holds the GIL; the pipe covers a parent that died before it was armed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        os.read(death_pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def write_stacks_on_demand(path: str) -> None:
    """Write the stacks of all threads into a file at SIGUSR1, in the signal's handler: Python's lock is not needed."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)


def load_package(folder: str, name: str = "cp_runtime") -> None:
    """Import the package from its folder without putting the folder above it, which has a `nodes/`, on sys.path."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {init}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def main() -> None:
    spec = json.loads(sys.argv[1])
    die_with_parent(spec["parent"], spec["death_fd"])
    write_stacks_on_demand(spec["stacks"])
    sys.path[0:1] = spec["path"]
    sys.argv = spec["argv"]
    load_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    importlib.import_module("cp_runtime.pool.worker").run(spec)


if __name__ == "__main__":
    main()
