"""A process that owns pools, as ComfyUI does, and does what it is told line by line. No ComfyUI: it starts in two seconds.

Tests use `Owner`. The other half of this file runs in the process that it starts: every line of its input is a JSON object
`{"id": 1, "do": "start", …}`, every answer a line `{"id": 1, "ok": true, …}`; all other lines are its log. It closes its pools
on its way out, as `cp_runtime.controller.controller` does.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARKER = "CONTEXT_PARALLEL_TEST_OWNER"
"""Environment variable that the process and everything it starts inherits."""
FORKED_CHILD_LIVES = 120  # seconds
THREAD_ENDS = 6  # seconds at most, where other tests take the cores; tests give it ten to exit


class OwnerError(Exception):
    """A command failed. `kinds`: names of the exception's class and of what it derives from."""

    def __init__(self, answer):
        self.kinds, self.message = answer["kinds"], answer["message"]
        super().__init__(f"{self.kinds[0]}: {self.message}")


class Owner:
    """Starts the process, talks to it, and ends it with everything it started.

    Args:
        temp: folder for its temporary files, also those of its pools.
        env: environment variables to set.
        wrapper: command in front of the interpreter.
        forked: whether its ranks are (see `support.preloaded`).
    """

    def __init__(self, temp, env=None, wrapper=(), forked=True):
        from support import preloaded

        self.temp, self.marker, self._folder = Path(temp), uuid.uuid4().hex, Path(tempfile.mkdtemp())
        self.log = []
        self._ids, self._answers, self._changed = itertools.count(1), {}, threading.Condition()
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        env = {**inherited, **(env or {}), MARKER: self.marker, "TMPDIR": str(temp), "XDG_RUNTIME_DIR": str(temp)}
        (theirs, commands), (printed, output) = os.pipe(), os.pipe()
        self._commands, self._printed = os.fdopen(commands, "wb"), os.fdopen(printed, "rb")
        program, files = [str(Path(__file__).resolve()), *["forked"] * forked], (theirs, output, output)
        self.process = preloaded.start(program, cwd=self._folder, env=env, files=files, wrapper=wrapper)
        for fd in (theirs, output):
            os.close(fd)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        try:
            self.ask("hello")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    @property
    def pid(self):
        return self.process.pid

    def send(self, do, **arguments):
        """Give a command and return its number."""
        number = next(self._ids)
        self._commands.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        self._commands.flush()
        return number

    def answer(self, number, timeout=120.0):
        """The answer to a command. Raises OwnerError where it failed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while number not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    raise TimeoutError(f"no answer within {timeout} s; the owner's log:\n{self.log_text()}")
                self._changed.wait(min(left, 0.5))
            answer = self._answers.pop(number)
        if not answer["ok"]:
            raise OwnerError(answer)
        return answer

    def ask(self, do, timeout=120.0, **arguments):
        """Give a command and return its answer."""
        return self.answer(self.send(do, **arguments), timeout)

    def log_text(self):
        """What the process and its ranks logged."""
        return "".join(self.log)

    def family(self, ignore=()):
        """Living processes that the owner or its children started, and the owner. Those that were forked have another's
        environment, but this folder."""
        from support.processes import inside, with_environment

        found = {process.pid: process for process in [*with_environment(MARKER, self.marker), *inside(self._folder)]}
        return [process for pid, process in found.items() if pid not in ignore]

    def wait_alone(self, timeout, ignore=()):
        """Wait until nothing of the family lives. Returns what does."""
        deadline = time.monotonic() + timeout
        while (left := self.family(ignore)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def end(self):
        """End the process, whatever it does, and everything that carries its mark."""
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in self.family():
            with contextlib.suppress(Exception):
                process.kill()
        self._reader.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._printed.close()

    def _read(self):
        for line in self._printed:
            if line.startswith(b'{"id"'):
                with self._changed:
                    answer = json.loads(line)
                    self._answers[answer["id"]] = answer
                    self._changed.notify_all()
            else:
                self.log.append(line.decode(errors="replace"))


def namespaces(*options):
    """A command that runs another one in namespaces of its own, or None where the kernel does not let this user make them."""
    unshare, nothing = shutil.which("unshare"), shutil.which("true")
    for user in ([], ["--map-root-user"]):
        command = [unshare, *user, *options]
        if unshare and subprocess.run([*command, nothing], capture_output=True, check=False).returncode == 0:
            return command
    return None


class Commands:
    """What the process can do."""

    def __init__(self):
        self.pools, self.busy, self._threads = {}, set(), []
        self._writing, self._afterwards = threading.Lock(), None
        atexit.register(self.at_exit)

    def at_exit(self):
        """Close what is idle, kill what is busy, say how the ranks ended, and let the threads end that used them."""
        for name, pool in self.pools.items():
            if name in self.busy:
                pool.abort("this process ends")
            else:
                pool.close()
            logging.info("pool %s is closed, exit codes %s", name, [process.returncode for process in pool.processes])
        # With its pool it has little left to do. One that is inside of torch when Python ends has the process aborted.
        for thread in self._threads:
            thread.join(THREAD_ENDS)

    def hello(self):
        return {}

    def start(self, pool, ranks=2):
        """Start a pool. One that had this name is dropped."""
        from support.pools import make_pool

        self.pools.pop(pool, None)
        with self.working(pool):
            self.pools[pool] = made = make_pool(ranks)
            made.start()
        return {"pids": made.pids, "thread": threading.get_native_id()}

    def wait(self, count=2):
        """Start processes that wait to be ranks."""
        from cp_runtime.pool.config import WorkerSite
        from cp_runtime.pool.launcher import child_environment
        from cp_runtime.pool.processes import WAITING

        WAITING.start(WorkerSite(), child_environment("cpu", count), count)
        return {}

    def echo(self, pool, nbytes=1000, value=7, timeout=60.0):
        """Send bytes through the ranks and compare."""
        import torch
        from support.pools import echo

        sent = torch.full((nbytes,), value, dtype=torch.uint8)
        with self.working(pool):
            return {"same": torch.equal(echo(self.pools[pool], sent, timeout), sent)}

    def working_on(self):
        return {"pools": sorted(self.busy)}

    def alive(self, pool):
        return {"alive": self.pools[pool].alive}

    def close(self, pool):
        self.pools.pop(pool).close()
        return {}

    def fork(self):
        """Start a child as a careless pack does: it inherits every descriptor, and outlives this process."""
        pid = os.fork()
        if pid == 0:
            time.sleep(FORKED_CHILD_LIVES)
            os._exit(0)
        return {"pid": pid}

    def hold_lock(self):
        """Answer, and then stay in C, holding the GIL."""
        from support.faulty_worker import KINDS

        self._afterwards = KINDS["lock"]
        return {}

    def limit(self, nbytes):
        """How large a file, and with it a memfd, may grow in this process. None: as large as allowed."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))
        return {}

    def limit_files(self, more):
        """How many descriptors this process may have, besides those that it has. None: as many as allowed."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = hard if more is None else len(os.listdir("/proc/self/fd")) - 1 + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return {}

    def environment(self):
        return {"environment": dict(os.environ)}

    def terminal(self, path):
        """Make a terminal this process's own: it and its group come to the foreground."""
        os.open(path, os.O_RDWR)
        return {"foreground": os.getpgrp()}

    def network(self):
        """What the host's name and IPv6 are worth here."""
        return {"host": socket.gethostname(), "resolves": _works(_resolve), "ipv6": _works(_bind_ipv6)}

    @contextlib.contextmanager
    def working(self, name):
        self.busy.add(name)
        try:
            yield
        finally:
            self.busy.discard(name)

    def run_in_thread(self, **request):
        self._threads.append(threading.Thread(target=self.run, kwargs=request, daemon=True))
        self._threads[-1].start()

    def run(self, id, do, **arguments):
        try:
            answer = {"ok": True, **getattr(self, do)(**arguments)}
        except Exception as error:  # noqa: BLE001  (the test gets it)
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = {"ok": False, "kinds": kinds, "message": str(error)}
        with self._writing:
            os.write(1, json.dumps({"id": id, **answer}).encode() + b"\n")  # one piece: lines of the log come between
        if self._afterwards is not None:
            self._afterwards()


def _works(function):
    with contextlib.suppress(OSError):
        function()
        return True
    return False


def _resolve():
    socket.getaddrinfo(socket.gethostname(), None)


def _bind_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))


def main():
    sys.path[0] = str(TESTS)
    if "forked" in sys.argv:
        from support import preloaded

        preloaded.fork_ranks()
    from support.package import load_package

    load_package()
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
    commands = Commands()
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("thread", False):
            commands.run_in_thread(**request)
        else:
            commands.run(**request)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the caller did to it
    main()
