"""The process that ranks are forked from. It imports what all of them need, once, and forks a rank on request.

Run by file name, as `python fork_server.py <descriptor of its socket> <descriptor of a file with its spec as JSON>`: every user
can read the arguments of a process, and their length is limited. The other end is `forking.ForkServer`. It uses the standard
library only, has one thread and touches no device: what a rank would inherit of a device cannot be used, and a lock that another
thread held at the fork is never released. The folder of this file leaves `sys.path` at once: its modules would shadow others.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import select
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
_PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")
_MESSAGE, _DESCRIPTORS = 1 << 12, 32  # longest message in bytes; most descriptors that come with one


def die_with_parent(parent: int) -> None:
    """End this process when the parent ends, whatever ends it and whatever this process does then, such as holding the GIL in C."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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


def read_spec(fd: int) -> dict[str, Any]:
    """Return the spec that the controller wrote into a file. It may be read more than once."""
    spec: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return spec


def preload(modules: list[str], left_out: list[str]) -> None:
    """Import modules, and what ranks run. Each may fail: ranks find out for themselves, and say so.

    One that makes this process unfit to be forked is left out by starting all over without it.
    """
    gc.disable()  # imports make no garbage, and looking for it takes an eighth of their time
    for name in [*modules, WORKER]:
        if name in left_out:
            continue
        with contextlib.suppress(Exception):
            import_by_name(name)
        if open_devices() or len(os.listdir("/proc/self/task")) > 1:
            os.execv(sys.executable, [*sys.orig_argv, name])
    gc.enable()


def open_devices() -> list[str]:
    """Return the devices that this process has open, such as /dev/nvidiactl."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in opened if path.startswith("/dev/") and not path.startswith(_PLAIN_DEVICES)]


class Server:
    """Forks ranks and says how they end.

    Messages are JSON. `{"start": 7}` comes with descriptors: of a file with the rank's spec, of its output, and of what the spec
    names. `{"reap": pid}` is for a rank whose end was noted, so that no other process gets its number before. `{"leave": true}`:
    once no rank is left. Answers: `{"id": 7, "pid": …}` or `{"id": 7, "errno": …}`, and at its end `{"id": 7, "status": …}`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._wakeup = os.pipe()  # gets a byte at SIGCHLD
        self._ranks: dict[int, int] = {}  # pid -> id, until it is reaped
        self._ended: set[int] = set()  # pids
        self._leaving = False

    def run(self) -> NoReturn:
        """Serve until the controller's process closes the socket."""
        for fd in self._wakeup:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        poller = select.poll()
        for fd in (self._wakeup[0], self._socket.fileno()):
            poller.register(fd, select.POLLIN)
        while not (self._leaving and not self._ranks):
            ready = [fd for fd, _ in poller.poll()]
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], _MESSAGE)
                self._note_ends()
            if self._socket.fileno() in ready:
                self._take_message()
        os._exit(0)

    def _take_message(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if "start" in message:
            self._start(message["start"], fds)
        elif "reap" in message:
            os.waitpid(message["reap"], 0)
            del self._ranks[message["reap"]]
            self._ended.discard(message["reap"])
        else:
            self._leaving = True
        for fd in fds:
            os.close(fd)

    def _start(self, number: int, fds: list[int]) -> None:
        server = os.getpid()
        gc.freeze()  # the collector would write to, and so copy, what all ranks share
        try:
            pid = os.fork()
        except OSError as error:
            self._say(id=number, errno=error.errno)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in self._wakeup:
                os.close(fd)
            self._socket.close()
            become_rank(server, *fds)
        self._ranks[pid] = number
        self._say(id=number, pid=pid)

    def _note_ends(self) -> None:
        for pid, number in self._ranks.items():
            if pid in self._ended:
                continue
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._ended.add(pid)
                self._say(id=number, status=ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _say(self, **answer: Any) -> None:
        self._socket.send(json.dumps(answer).encode())


def become_rank(parent: int, spec_fd: int, output: int, *fds: int) -> NoReturn:
    """Run a rank in this process, just forked. `fds`: what the names in the spec's "descriptors" stand for."""
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()  # Ctrl-C in the terminal reaches the UI process only
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for standard in (1, 2):
            os.dup2(output, standard)
        spec = read_spec(spec_fd)
        os.close(output)
        os.close(spec_fd)
        spec |= dict(zip(spec.pop("descriptors"), fds, strict=True))
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"{RANK_NAME}{spec['rank']}".encode())
        write_stacks_on_demand(spec["stacks_fd"])
        allow_open_files()
        os.environ.clear()
        os.environ.update(spec.pop("environment"))
        sys.argv = spec["argv"]
        import_by_name(WORKER).run(spec)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (the controller shows what a rank wrote last)
        traceback.print_exc()
    finally:
        os._exit(code)  # groups may be poisoned: leaving without their destructors cannot hang


def main() -> NoReturn:
    connection, spec_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    spec = read_spec(spec_fd)
    die_with_parent(spec["parent"])
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"cp-fork-server")
    set_search_path(spec["path"])
    sys.argv, left_out = spec["argv"], sys.argv[3:]
    preload(spec["preload"], left_out)
    os.close(spec_fd)
    connection.set_inheritable(False)
    Server(connection).run()


if __name__ == "__main__":
    main()
