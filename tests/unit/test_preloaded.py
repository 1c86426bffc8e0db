"""A program that `support.preloaded` forks starts and ends as any other does."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support import preloaded

MODULE = "this"  # which no program imports by chance
PROGRAM = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[:2], "environment": dict(os.environ),
    "own session": os.getsid(0) == os.getpid(),
    "read": sys.stdin.read(), "imported": sys.modules.keys() >= {"this", "sitecustomize"}, "open": len(os.listdir("/proc/self/fd")),
    "name": __name__, "file": __file__,
}), flush=True)
"""


OWNER = """
import json, os, subprocess, sys
reading, writing = os.pipe()
for _ in range(2):  # there is one copy: the second time it is an interpreter
    command = [sys.executable, "-u", "fork_server.py", str(writing)]
    child = subprocess.Popen(
        command, env={"WORD": "here"}, pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    found = json.loads(child.communicate()[0])
    assert os.read(reading, 10) == b"hello"
    right = found["pid"] == child.pid and found["parent"] == os.getpid()
    print(json.dumps({**found, "right": right, "pid": 0, "parent": 0, "status": child.returncode}), flush=True)
"""
FORK_SERVER = """
import json, os, sys
os.write(int(sys.argv[1]), b"hello")
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "arguments": len(sys.argv), "word": os.environ["WORD"],
    "started": sys.orig_argv[1:3], "own session": os.getsid(0) == os.getpid(), "folder": os.getcwd(),
    "open": len(os.listdir("/proc/self/fd")), "name": __name__,
    "imported": "this" in sys.modules,
}))
raise SystemExit(5)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The process that programs are forked from."""
    with pytest.MonkeyPatch.context() as patch, preloaded.running(tmp_path_factory.mktemp("preloaded"), modules=[MODULE]) as found:
        for name, value in found.items():
            patch.setenv(name, value)
        yield


class Start:
    """Starts programs from their text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "output"
        (folder / "sitecustomize.py").write_text("import os; os.environ['CUSTOMIZED'] = 'yes'")

    def __call__(
        self, text: str, *arguments: str, spares: Sequence[Sequence[str]] = (), **variables: str
    ) -> preloaded.Program | None:
        program = self.folder / "program.py"
        program.write_text(text)
        with open(os.devnull, "rb") as nothing, self.output.open("wb") as out:
            env = {**os.environ, "PYTHONPATH": str(self.folder), **variables}
            files = (nothing.fileno(), out.fileno(), out.fileno())
            return preloaded.fork([str(program), *arguments], cwd=self.folder, env=env, files=files, spares=spares)


@pytest.fixture
def start(shared, tmp_path):
    return Start(tmp_path)


def test_what_a_program_finds(start):
    program = start(PROGRAM, "one", "two", WORD="here")
    assert program.wait(30) == 0
    found = json.loads(start.output.read_text())
    file = str(start.folder / "program.py")
    environment = found.pop("environment")
    assert environment["WORD"] == "here"
    assert environment["CUSTOMIZED"] == "yes"
    assert environment.keys() - os.environ.keys() == {"WORD", "CUSTOMIZED", "PYTHONPATH"}
    assert found == {
        "argv": [file, "one", "two"], "cwd": str(start.folder), "path": [str(start.folder)] * 2, "own session": True, "read": "",
        "imported": True, "open": 4, "name": "__main__", "file": file,
    }  # fmt: skip


@pytest.mark.parametrize(("text", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.abort()", -6)])
def test_how_it_ends(start, text, code):
    program = start(f"import atexit; atexit.register(print, 'at its exit')\n{text}")
    assert program.wait(30) == code == program.poll()
    assert ("at its exit" in start.output.read_text()) == (code >= 0)
    assert ("ZeroDivisionError" in start.output.read_text()) == (code == 1)


def test_signals(start):
    sleeper = start("import time; time.sleep(60)")
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    sleeper.send_signal(signal.SIGINT)
    assert sleeper.wait(30) == -signal.SIGINT
    assert "KeyboardInterrupt" in start.output.read_text()
    sleeper = start("import time; time.sleep(60)")
    sleeper.kill()
    assert sleeper.wait(30) == -signal.SIGKILL
    sleeper.send_signal(signal.SIGTERM)  # to nobody


def test_it_ends_with_who_asked_for_it(start):
    program = start("import time; time.sleep(60)")
    pid = os.pidfd_open(program.pid)
    del program
    assert select.select([pid], [], [], 30)[0]
    os.close(pid)


def test_a_module_that_is_run_to_its_end(start):
    """As `python -m`: the folder comes first, and the arguments follow the file's name."""
    (start.folder / "one.py").write_text("import sys; print(sys.argv, file=sys.stderr); print(sys.path[0]); raise SystemExit(4)")
    forked = preloaded.run(["-m", "one", "two"], cwd=start.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(preloaded.VARIABLE)
        started = preloaded.run(["-m", "one", "two"], cwd=start.folder)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)
    assert forked.returncode == 4
    assert forked.stdout.strip() == str(start.folder)


spares = pytest.mark.skipif(not preloaded.SPARES, reason="needs Python 3.11: see support.preloaded.SPARES")


@spares
def test_a_spare_is_what_an_interpreter_would_be(start):
    (start.folder / "fork_server.py").write_text(FORK_SERVER)
    program = start(OWNER, spares=[preloaded.FORK_SERVER])
    assert program.wait(30) == 0, start.output.read_text()
    spare, interpreter = map(json.loads, start.output.read_text().splitlines())
    assert (spare.pop("imported"), interpreter.pop("imported")) == (True, False)
    assert spare == interpreter
    assert (spare["right"], spare["status"]) == (True, 5)


CHAIN = """
import os, subprocess, sys
print("this" in sys.modules, flush=True)
if sys.argv[1:]:
    subprocess.run([sys.executable, *sys.argv[1:]], env=dict(os.environ), check=True)
"""


@spares
def test_a_spare_has_a_spare(start):
    names = ["one.py", "two.py", "three.py"]
    for name in names:
        (start.folder / name).write_text(CHAIN)
    assert start(CHAIN, *names, spares=[names[:2]]).wait(30) == 0
    assert start.output.read_text().split() == ["True", "True", "True", "False"]


@spares
def test_a_spare_that_is_not_needed_ends_with_its_program(start):
    program = start("import time; print('runs', flush=True); time.sleep(60)", spares=[preloaded.FORK_SERVER])
    while not start.output.read_text():
        time.sleep(0.01)
    (spare,) = (child for child in psutil.Process(program.pid).children())
    program.kill()
    program.wait(30)
    assert psutil.wait_procs([spare], 10)[1] == []


def test_what_libraries_read_once_needs_an_interpreter(start):
    assert start("pass", OMP_NUM_THREADS="17") is None
    assert start("pass", LD_PRELOAD="nothing.so") is None
    assert [start("pass", **{name: "another"}) for name in preloaded.ANOTHER_PROCESSOR] == [None] * 3


def test_without_the_process_nothing_is_forked(start, monkeypatch):
    monkeypatch.delenv(preloaded.VARIABLE)
    assert start("pass") is None


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import subprocess, time; print(subprocess.Popen(['sleep', '61.25']).pid, flush=True); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run([str(program)], timeout=1.0)
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "61.25"]]
