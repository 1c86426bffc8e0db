"""The program of a rank's process: imports what ranks need, then waits to be told which rank it is.

Run by file name, as `python rank_program.py <descriptor of its socket>`. The other end is `processes.LocalProcess`. Both messages
are files without names, as JSON: other users can read the arguments of a process, and their length is limited. The folder of this
file leaves `sys.path` at once: its modules would shadow others.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from types import ModuleType
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
RANK_NAME = "cp-rank-"
"""What the kernel calls a rank's process, and `top` with it; its number follows."""
PACKAGE = "cp_runtime"
WORKER = f"{PACKAGE}.pool.worker"
_DESCRIPTORS = 32  # most that come with a message


def die_with_parent(parent: int) -> None:
    """End this process when the parent ends, whatever ends it and whatever this process does then, such as holding the GIL in C."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Have `ps` and the like call this process by a name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def write_stacks_on_demand(fd: int) -> None:
    """Write the stacks of all threads into a file at SIGUSR1, from the signal's handler: the GIL is not needed."""
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def allow_open_files() -> None:
    """Raise the limit of open files to what this user may have.

    gloo listens on a port of the loopback interface and aborts the process when it cannot accept a connection. At the usual limit
    of 1,024, any local user could bring that about.
    """
    import resource  # only Linux has it, and only ranks get here

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_search_path(path: list[str]) -> None:
    """Put folders in front of `sys.path`, in place of this file's; with `-I` or `-P` that is not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*path, *(folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here)]


def load_package(folder: str) -> None:
    """Import the package from its folder without putting the folder above it, which has a `nodes/`, on sys.path."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {init}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[PACKAGE]
        raise


def import_by_name(name: str) -> ModuleType:
    """Import a module, which may be one of this package: no folder of `sys.path` leads to that."""
    if name.startswith(f"{PACKAGE}.") and PACKAGE not in sys.modules:
        load_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return importlib.import_module(name)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message: return it and the descriptors that come with it. End this process if nobody needs it any more."""
    data, fds, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    with open(fds[0], "rb") as file:
        file.seek(0)
        message: dict[str, Any] = json.load(file)
    return message, fds[1:]


def preload(modules: list[str]) -> None:
    """Import modules, and what ranks run. Each may fail: the rank finds out for itself, and says so."""
    gc.disable()  # imports make no garbage, and looking for it takes an eighth of their time
    for name in [*modules, WORKER]:
        with contextlib.suppress(Exception):
            import_by_name(name)
    gc.freeze()  # nor does the collector find any there later
    gc.enable()


def run(connection: socket.socket) -> None:
    """Be a rank. The first message says what to import, the second one which rank; its "descriptors" are the names of those that
    come with it."""
    write_stacks_on_demand(2)  # of an import that hangs: into the log
    site, _ = receive(connection)
    die_with_parent(site["parent"])
    name_process("cp-waiting")
    set_search_path(site["path"])
    sys.argv = site["argv"]
    preload(site["preload"])
    spec, fds = receive(connection)
    connection.close()
    spec |= dict(zip(spec.pop("descriptors"), fds, strict=True))
    name_process(f"{RANK_NAME}{spec['rank']}")
    write_stacks_on_demand(spec["stacks_fd"])
    allow_open_files()
    os.environ.clear()
    os.environ.update(spec.pop("environment"))
    import_by_name(WORKER).run(spec)


def main() -> NoReturn:
    code = 1
    try:
        run(socket.socket(fileno=int(sys.argv[1])))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (the controller shows what a rank wrote last)
        traceback.print_exc()
    finally:
        os._exit(code)  # groups may be poisoned: leaving without their destructors cannot hang


if __name__ == "__main__":
    main()
