"""A program that `support.preloaded` forks starts and ends as any other does."""

import json
import os
import subprocess
from pathlib import Path

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

    def __call__(self, text: str, *arguments: str, ranks: bool = False, **variables: str) -> preloaded.Program | None:
        program = self.folder / "program.py"
        program.write_text(text)
        with open(os.devnull, "rb") as nothing, self.output.open("wb") as out:
            env = {**os.environ, "PYTHONPATH": str(self.folder), **variables}
            files = (nothing.fileno(), out.fileno(), out.fileno())
            return preloaded.fork([str(program), *arguments], cwd=self.folder, env=env, files=files, ranks=ranks)


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


STARTS = """
import os, subprocess, sys
read, write = os.pipe()
rank = subprocess.Popen(
    [sys.executable, "-u", "rank_program.py", str(write)], pass_fds=[write], env={**os.environ, "CP_TEST_CARDS": ""}
)
os.close(write)
print(os.read(read, 99).decode() == f"{os.getpid()} True", rank.wait(), flush=True)
"""
RANK = """
import os, sys
os.write(int(sys.argv[1]), f"{os.getppid()} {'this' in sys.modules}".encode())
os._exit(3)
"""


@pytest.mark.skipif(not hasattr(subprocess, "_fork_exec"), reason="Python 3.10 starts ranks as any other program")
def test_a_rank_is_forked_and_is_the_child_of_the_program_that_starts_it(start):
    (start.folder / "rank_program.py").write_text(RANK)
    program = start(STARTS, ranks=True)
    assert program.wait(30) == 0
    assert start.output.read_text() == "True 3\n"
