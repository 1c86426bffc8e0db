"""A process that has imported what programs of the tests need, and forks a program whenever one is asked for.

ComfyUI's server imports for eight seconds of a core, six of them code of other packages. `make test` starts some thirty, so it
imports that once: `.ci/lanes.py` starts this file and leaves the path of its socket in `VARIABLE`; without it, programs start as
any other. `support.ranks` starts more of them, with what ranks import. A program that is forked runs from the first line of its
file, with its own arguments, import path, environment, folder and session. What stays from here is what has been imported, and what
the system says about the interpreter: its command line, its parent, and the environment that it was started with.

The first half of this file asks for programs, the second half is the process.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NoReturn

VARIABLE = "CP_TEST_PRELOADED"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "comfyui-context-parallel", "inductor"
    ),
}
"""Of everything that tests start, unless they or the caller say something else. OpenMP's threads wait for each other by spinning:
with as many as cores, on cores that are taken, a server needs four times the seconds. And inductor asks the processor what it can
do, without compiling a program for every set of instructions first; it compiles where it is called; and what it has compiled is
kept for the next run."""
ANOTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
"""Has torch, oneDNN and MKL compute as on a processor with the narrowest vectors. MKL then rounds products of 1 to 7 rows otherwise
than those of more, and takes no notice of addresses."""
MODULES = (
    "comfy_kitchen", "torchaudio", "torchsde", "spandrel", "kornia",
    "scipy.integrate", "scipy.ndimage", "scipy.signal", "scipy.stats",
    "transformers", "transformers.models.clip.tokenization_clip", "transformers.models.t5.tokenization_t5",
    "transformers.models.qwen2.tokenization_qwen2", "aiohttp.web", "alembic.command", "av", "OpenGL.EGL", "OpenGL.GL",
    "OpenGL.GLES3", "psutil", "pydantic_settings", "requests", "sqlalchemy.orm", "sqlalchemy.dialects.sqlite",
    "torch._dynamo.backends.debugging", "torch._inductor.compile_fx",
)  # fmt: skip
"""What ComfyUI's server imports of other packages, and the compiler when it is first used. ComfyUI's own code looks at the command
line while it is imported."""
# Read when a library is loaded: a program that sets them otherwise is not forked.
_READ_ONCE = ("OMP_", "MKL_", "OPENBLAS_", "GOMP_", "MALLOC_", "LD_", "ATEN_", "ONEDNN_")
_MESSAGE = 1 << 17
_TAKES = 120.0  # seconds for all imports, and for a fork
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
RANK_PROGRAM = "rank_program.py"
_RUNTIME = Path(__file__).resolve().parents[2] / "cp_runtime"
_COMFYUI = "cp_runtime.comfy.rank.preload"
_CARDS = "CP_TEST_CARDS"  # as in stand_in: such ranks import this package when torch has its fake devices


def name_process(program: str | Path) -> None:
    """Have `ps` and the like call this process by a file's name: the command line is that of what it was forked from."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, Path(program).stem.encode())


class Program:
    """A forked program: as much of `subprocess.Popen` as tests use. It gets SIGTERM when the caller is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        connection.settimeout(_TAKES)
        self.pid: int = json.loads(connection.recv(_MESSAGE))["pid"]

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            data = self._connection.recv(_MESSAGE)
            # Without an answer the process that it was forked from is gone, and the kernel ends it as well.
            self.returncode = json.loads(data)["status"] if data else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it now."""
        self.send_signal(signal.SIGKILL)


Process = Program | subprocess.Popen[bytes]


def fork(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], files: tuple[int, int, int], ranks: bool = False
) -> Program | None:
    """Run a program, in a session of its own; None where it has to be started as any other.

    Args:
        argv: what the interpreter gets: a file, or `-m` and a module, and arguments.
        files: descriptors of its standard input, output and errors.
        ranks: whether those that it starts are forked as well: see `fork_ranks`.
    """
    path = os.environ.get(VARIABLE)
    if path is None or any(os.environ.get(name) != env.get(name) for name in {*os.environ, *env} if name.startswith(_READ_ONCE)):
        return None
    return Program(_ask(path, {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "ranks": ranks}, files))


def _ask(path: str, request: dict[str, Any], files: Sequence[int] = ()) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    files: tuple[int, int, int],
    ranks: bool = False,
    wrapper: Sequence[str] = (),
) -> Process:
    """Run a program, forked where that can be. Arguments as those of `fork`, and a command in front of the interpreter."""
    stdin, stdout, stderr = files
    return (None if wrapper else fork(argv, cwd=cwd, env=env, files=files, ranks=ranks)) or subprocess.Popen(
        [*wrapper, sys.executable, "-u", *argv], cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, forked where that can be, and return what it printed.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was ended.
    """
    env, cwd = env if env is not None else os.environ, cwd if cwd is not None else Path.cwd()
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = (nothing.fileno(), out.fileno(), err.fileno())
        process = start(argv, cwd=cwd, env=env, files=files)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(argv), code, out.read(), err.read())


def write_models(module: str, folder: Path, *names: str) -> str:
    """Have a module of tests/support that needs ComfyUI, `support.models` or `support.vaes`, write models; return what it printed.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    path = os.pathsep.join(filter(None, (os.environ["COMFYUI_PATH"], os.environ.get("PYTHONPATH", ""))))
    done = run(["-m", module, str(folder), *names], cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise RuntimeError(f"{module}: {done.stderr[-2000:]} {done.stdout[-300:]}")
    return done.stdout


class Server:
    """A process that programs are forked from. It ends with this one.

    Args:
        path: for its socket.
        modules: what it imports.
    """

    def __init__(self, path: str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self.path = path
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(64)
            files = (listener.fileno(), 2, 2)
            self.process = start([str(Path(__file__).resolve()), *modules], cwd=Path.cwd(), env=env, files=files)

    def fork(self, argv: Sequence[str], *, env: Mapping[str, str], files: tuple[int, int, int]) -> Program:
        """Run a program. Arguments as those of `fork`."""
        request = {"argv": list(argv), "cwd": str(Path.cwd()), "env": dict(env), "ranks": False}
        return Program(_ask(self.path, request, files))

    def prepare(self, module: str, value: Any, timeout: float) -> bool:
        """Call the function `prepare` of a module in the process: all programs find what it made. False where it failed."""
        with _ask(self.path, {"module": module, "value": value}) as connection:
            return bool(select.select([connection], [], [], timeout)[0] and connection.recv(_MESSAGE))

    def end(self) -> None:
        """End it, and all programs."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(folder: Path, modules: Sequence[str] = MODULES) -> Iterator[dict[str, str]]:
    """The process that programs are forked from. Yields the environment variable by which `fork` finds it.

    Args:
        folder: for its socket.
    """
    # As a test's server has it, of which a package asks while it is imported.
    server = Server(str(folder / "preloaded"), modules, {**ENVIRONMENT, **os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        yield {VARIABLE: server.path}
    finally:
        server.end()


class _Preloaded:
    """Forks programs and says how they end. A connection is a program."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._wakeup = os.pipe()  # gets a byte at SIGCHLD
        self._programs: dict[int, socket.socket] = {}  # by pid, until it is reaped

    def run(self) -> dict[str, Any]:
        """Serve. Returns in a program that was just forked, with what was asked for."""
        for fd in self._wakeup:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        while True:
            asked = {connection.fileno(): pid for pid, connection in self._programs.items()}  # -1: closed
            ready = select.select([self._wakeup[0], self._listener.fileno(), *(asked.keys() - {-1})], [], [])[0]
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], _MESSAGE)
                self._reap()
            for fd in asked.keys() & set(ready):  # nobody says more: it was closed
                if asked[fd] in self._programs:
                    self._programs[asked[fd]].close()
                    os.kill(asked[fd], signal.SIGTERM)
            if self._listener.fileno() in ready and (request := self._fork()) is not None:
                return request

    def _reap(self) -> None:
        for pid, connection in list(self._programs.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._programs[pid]
                with contextlib.suppress(OSError):  # closed by the other side
                    connection.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
                connection.close()

    def _fork(self) -> dict[str, Any] | None:
        """Fork a program: what was asked for in it, None in this process."""
        connection, _ = self._listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE, 3, socket.MSG_CMSG_CLOEXEC)
        request: dict[str, Any] = json.loads(data)
        if "module" in request:
            with connection:
                sys.modules[request["module"]].prepare(request["value"])
                gc.freeze()
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    connection.send(b"done")
            return None
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(server, connection, fds)
            return request
        self._programs[pid] = connection
        connection.send(json.dumps({"pid": pid}).encode())
        for fd in fds:
            os.close(fd)
        return None

    def _become_child(self, server: int, connection: socket.socket, fds: list[int]) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != server:
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
        for fd in (*fds, *self._wakeup):
            os.close(fd)
        for held in (self._listener, connection, *self._programs.values()):
            held.close()


class _Template:
    """A copy of this process, from before its first line, that its ranks are forked from: one with threads cannot be forked, and
    each rank would import for seconds.

    A rank is the copy's grandchild. The process between the two ends at once, and the rank is this process's child then, as if it
    had been started here. `subprocess` finds no difference.
    """

    def __init__(self) -> None:
        self._owner, self._interpreter, self._asking = os.getpid(), sys.executable, threading.Lock()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if os.fork() == 0:
                self._connection.close()
                self._serve(theirs)
        self._fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
        subprocess._fork_exec = self._start  # type: ignore[attr-defined]

    def _start(self, argv: Sequence[str], *how: Any) -> int:
        """What `subprocess` calls to start a program: the arguments of CPython's `_posixsubprocess.fork_exec`."""
        (_, _, kept, _, env, stdin, _, _, stdout, _, stderr, _, failed, *_) = how
        names = [os.path.basename(os.fsdecode(argument)) for argument in argv]
        if os.getpid() != self._owner or RANK_PROGRAM not in names or argv[0] != self._interpreter:
            return self._fork_exec(argv, *how)
        inherited = [fd for fd in kept if fd != failed]
        standard = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        request = {
            "argv": list(argv[names.index(RANK_PROGRAM) :]),
            "env": dict(os.fsdecode(item).split("=", 1) for item in env),
            "cwd": os.getcwd(),
            "fds": [0, 1, 2, *inherited],
            "site": self._site(),
        }
        with self._asking, open(os.memfd_create("request"), "w+b") as file:  # import paths may be longer than a message
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._connection, [b"start"], [file.fileno(), *standard, *inherited])
            return int(self._connection.recv(_MESSAGE))

    @staticmethod
    def _site() -> dict[str, Any]:
        """What the ranks that are being started will be told to import: see `processes.Waiting`."""
        (module,) = (found for name, found in list(sys.modules.items()) if name.endswith("cp_runtime.pool.processes"))
        path, argv, preload, _ = module.WAITING._key or ((), [""], (), {})  # one may be started by itself
        return {"path": list(path), "argv": argv, "preload": preload}

    def _serve(self, connection: socket.socket) -> NoReturn:
        """In the copy: fork ranks as long as the process is there."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._owner:
            os._exit(1)
        os.setsid()
        imported = False
        while True:
            data, fds, _, _ = socket.recv_fds(connection, _MESSAGE, 32, socket.MSG_CMSG_CLOEXEC)
            if not data:
                os._exit(0)
            with open(fds.pop(0), "rb") as file:
                request = json.load(file)
            if _CARDS not in request["env"] and not imported:
                self._import(request["site"])
                imported = True
            middle = os.fork()
            if middle == 0:
                if os.fork() == 0:
                    self._become_rank(request, connection, fds)
                os._exit(0)
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)

    @staticmethod
    def _import(site: dict[str, Any]) -> None:
        """Import, for the first rank, what it and all others run."""
        program = runpy.run_path(str(_RUNTIME / "pool" / RANK_PROGRAM))
        before, sys.argv = list(sys.path), list(site["argv"])
        program["set_search_path"](site["path"])
        program["preload"]([_COMFYUI] if _COMFYUI in site["preload"] else [])
        sys.path[:] = before

    def _become_rank(self, request: dict[str, Any], connection: socket.socket, fds: Sequence[int]) -> NoReturn:
        while os.getppid() != self._owner:
            time.sleep(0.0005)
        connection.send(str(os.getpid()).encode())
        connection.close()
        os.setsid()
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
        for fd in fds:
            os.close(fd)
        for fd, wanted in zip(above, request["fds"], strict=True):
            os.dup2(fd, wanted)
            os.close(fd)
        if _CARDS in request["env"]:
            for name in [name for name in sys.modules if name.partition(".")[0] == _RUNTIME.name]:
                del sys.modules[name]
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        _run(request)
        os._exit(0)


def fork_ranks() -> None:
    """Fork the ranks that this process will start, if it does not yet. Call it before there is another thread. Python 3.10 starts
    them as any other: it has no function that can be replaced."""
    if isinstance(getattr(subprocess, "_fork_exec", None), BuiltinFunctionType):
        _Template()


def _run(request: dict[str, Any]) -> None:
    """Be the program, as if the interpreter had just started with it."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # somebody may have asked for it while it was imported
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = path
    if path:
        sys.modules.pop("sitecustomize", None)  # of the process that this one was forked from
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")
    program, *arguments = request["argv"]
    name_process(arguments[0] if program == "-m" else program)
    if program == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def settle_processor() -> None:
    """Have inductor know what the processor can do, before anybody asks.

    `TORCHINDUCTOR_VEC_ISA_OK` answers for the usual sets of instructions. For newer ones a program is compiled, and loaded by an
    interpreter that imports torch, in every process that compiles: three times three seconds. They are left out.
    """
    isa = sys.modules.get("torch._inductor.cpu_vec_isa")
    if isa is not None:
        check, isa.VecISA.check_build = isa.VecISA.check_build, lambda *_: False
        isa.valid_vec_isa_list()  # keeps its result
        isa.VecISA.check_build = check


def main() -> None:
    del sys.path[0]  # this file's folder
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    listener = socket.socket(fileno=os.dup(0))  # which no child inherits
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the caller did to them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()  # a fifth of the time
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    settle_processor()
    inspect.getmodule(sys._getframe())  # it keeps every module's file; torch asks for them with every operator that is registered
    gc.freeze()  # else the collector copies what the programs share
    request = _Preloaded(listener).run()
    if request["ranks"]:
        fork_ranks()
    _run(request)


if __name__ == "__main__":
    main()
