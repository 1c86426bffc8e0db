"""First code of a worker rank: tie its life to the parent, then load the package and run the worker.

Run by file name, as `python bootstrap.py <descriptor of a file with the spec as JSON>`: every user can read the arguments of a
process, and their length is limited. Nothing heavy is imported before the process is armed. The folder of this file leaves
`sys.path` at once: its modules would shadow others.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
from typing import Any

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


def write_stacks_on_demand(fd: int) -> None:
    """Write the stacks of all threads into a file at SIGUSR1, from the signal's handler: the GIL is not needed."""
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def allow_open_files() -> None:
    """Raise the limit of open files to what this user may have.

    gloo listens on a port of the loopback interface and aborts the process when it cannot accept a connection. At the usual limit
    of 1,024, any local user could bring that about.
    """
    import resource  # only Linux has it, and only a rank gets here

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_search_path(path: list[str]) -> None:
    """Put folders in front of `sys.path`, in place of this file's; with `-I` or `-P` that is not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*path, *(folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here)]


def load_package(folder: str, name: str = "cp_runtime") -> None:
    """Import the package from its folder without putting the folder above it, which has a `nodes/`, on sys.path."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {init}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def read_spec(fd: int) -> dict[str, Any]:
    """What the controller wants this rank to be; see `WorkerPool`."""
    with open(fd, "rb") as file:
        spec: dict[str, Any] = json.load(file)
    return spec


def main() -> None:
    spec = read_spec(int(sys.argv[1]))
    die_with_parent(spec["parent"], spec["death_fd"])
    write_stacks_on_demand(spec["stacks_fd"])
    allow_open_files()
    set_search_path(spec["path"])
    sys.argv = spec["argv"]
    load_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    importlib.import_module("cp_runtime.pool.worker").run(spec)


if __name__ == "__main__":
    main()
