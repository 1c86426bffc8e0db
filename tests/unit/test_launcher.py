"""What a rank's interpreter is started with, and what a user is told when it cannot be."""

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.package import ROOT
from torch._inductor.runtime import cache_dir_utils

from cp_runtime.errors import PoolError
from cp_runtime.pool import launcher
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.launcher import child_environment, name_limit, starting
from cp_runtime.pool.peers import Connection
from cp_runtime.pool.processes import WAITING, LocalProcess
from cp_runtime.pool.worker_pool import WorkerPool

OPTIONS = "import json, subprocess; print(json.dumps(subprocess._args_from_interpreter_flags()))"  # as `processes` asks
SEEN = "import json, sys; print(json.dumps([list(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions]))"


def run(options, *command):
    done = subprocess.run([sys.executable, *options, *command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-s"],
        ["-E", "-B"],
        ["-I"],
        ["-OO", "-s"],
        ["-X", "utf8=0", "-X", "faulthandler", "-W", "error::SyntaxWarning", "-W", "ignore::ImportWarning"],
    ],
    ids=" ".join,
)
def test_ranks_inherit_the_options_of_the_interpreter(options):
    inherited = run(options, "-c", OPTIONS)
    assert run(inherited, "-c", SEEN) == run(options, "-c", SEEN)


THREADS = """
import json, os, sys
sys.path[:0] = {paths}
from support.package import load_package
load_package()
from cp_runtime.pool.launcher import child_environment
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OWN="1")
print(json.dumps(child_environment("cpu", 1)))
""".format(paths=[str(ROOT / "tests")])


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3"}], ids=["none", "the user's"])
def test_ranks_compute_on_the_threads_that_the_user_chose(given):
    """And not on those that a node pack has chosen for itself in ComfyUI's process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))} | given
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["OMP_NUM_THREADS"] == given.get("OMP_NUM_THREADS", str(os.cpu_count()))
    assert ("MKL_NUM_THREADS" in found, found["OWN"]) == (False, "1")


LACKING = [
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u.*pids.max"),
    (RuntimeError("can't start new thread"), "ulimit -u.*pids.max"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
]


@pytest.mark.parametrize(("error", "limit"), LACKING, ids=lambda value: str(value))
def test_a_start_without_room_names_the_limit(error, limit):
    with pytest.raises(PoolError, match=f"the workers could not be started: .*The limit is that of .*{limit}"), starting():
        raise error


@pytest.mark.parametrize("program", ["/nowhere/python", "a\0b", 3], ids=["OSError", "ValueError", "TypeError"])
def test_whoever_starts_a_process_gets_its_error(monkeypatch, program):
    """Whatever it is: the caller waits for it. The next one starts."""
    raised = queue.SimpleQueue()

    def start():
        try:
            LocalProcess(WorkerSite(), dict(os.environ))
        except Exception as error:  # noqa: BLE001  (compared below)
            raised.put(error)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        threading.Thread(target=start, daemon=True).start()
        assert isinstance(raised.get(timeout=20), (OSError, ValueError, TypeError))
    process = LocalProcess(WorkerSite(preload=()), dict(os.environ))
    process.kill()
    assert process.wait(20)
    assert process.returncode == -signal.SIGKILL


def test_other_errors_of_a_start_stay_what_they_are():
    with pytest.raises(RuntimeError, match=r"^something else$"), starting():
        raise RuntimeError("something else")


def test_what_a_rank_says_of_a_missing_thread():
    """gloo's threads: the text of the system's C++ library, without a number."""
    assert "ulimit -u" in name_limit(RuntimeError("Resource temporarily unavailable"))
    assert name_limit(RuntimeError("shapes cannot be multiplied")) == ""


@pytest.mark.parametrize("name", ["TORCH_NCCL_HIGH_PRIORITY", "NCCL_LAUNCH_ORDER_IMPLICIT"])
def test_what_nccl_is_told_unless_the_user_says_otherwise(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert (child_environment("cuda", 2)[name], name in child_environment("cpu", 2)) == ("1", False)
    monkeypatch.setenv(name, "0")
    assert child_environment("cuda", 2)[name] == "0"


@pytest.mark.parametrize(("device", "backend", "hosts"), [("cuda:0", "nccl", 2), ("cuda:0", "gloo", 0), ("cpu", "gloo", 0)])
def test_ranks_on_one_card_are_computers_of_their_own_to_nccl(device, backend, hosts, monkeypatch):
    given: list[dict[str, str]] = []
    rank = SimpleNamespace(
        begin=lambda _, environment, *__: given.append(environment),
        kill=lambda: None,
        wait=lambda _: True,
        log=SimpleNamespace(finish=list),
    )
    monkeypatch.setattr(WAITING, "take", lambda *_: [rank, rank])
    config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), backend="gloo")
    pool = WorkerPool(replace(config, devices=(device, device), backend=backend), WorkerSite())
    pool._start_processes(Connection(backend=backend))
    pool.kill()
    assert len({environment["NCCL_HOSTID"] for environment in given if "NCCL_HOSTID" in environment}) == hosts


def test_what_is_compiled_is_kept_in_the_users_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for _ in range(2):
        environment = child_environment("cpu", 2)
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "comfyui-context-parallel" / "inductor")
        cache_dir_utils.cache_dir()  # as ComfyUI has it asked before it imports this pack
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(tempfile.gettempdir())
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/data/compiled")  # the user said so
    assert child_environment("cpu", 2)["TORCHINDUCTOR_CACHE_DIR"] == "/data/compiled"


def _nothing(folder):
    pass


def _open_to_all(folder):
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder):
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [_nothing, Path.mkdir, _open_to_all, _link, Path.touch])
def test_where_the_cache_folder_cannot_be_made_ranks_import_torch_all_the_same(monkeypatch, tmp_path, make):
    """It makes the folder when it is imported. Nothing is taken from a folder that others can write to."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"comfyui-context-parallel-{os.getuid()}"
    make(own)
    launcher._temporary_folder.cache_clear()
    first, second = (Path(child_environment("cpu", 2)["TORCHINDUCTOR_CACHE_DIR"]) for _ in range(2))
    launcher._temporary_folder.cache_clear()
    assert first == second
    assert first.parent == tmp_path
    assert (first == own) == (make in (_nothing, Path.mkdir))
    assert first.is_dir()
    assert not first.is_symlink()
    assert not first.stat().st_mode & 0o022
