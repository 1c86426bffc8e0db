"""Case 36: folders and files of the pool are private, and those of others are left alone."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.pools import small_pool

from cp_runtime.pool.launcher import DIRECTORY_PREFIX, make_directory
from cp_runtime.pool.stacks import KEEP, PREFIX, collect_stacks, stacks_file


@pytest.fixture
def open_umask():
    """Files are readable by everybody unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_rendezvous_folder_is_private(tmp_path, monkeypatch, open_umask):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_pool() as pool:
        folder = pool._directory
        assert folder.parent == tmp_path
        assert (mode(folder), folder.lstat().st_uid) == (0o700, os.getuid())
        assert {path.name for path in folder.iterdir()} >= {"stacks-0", "stacks-1", "store"}
        for rank in range(2):
            assert mode(stacks_file(folder, rank)) == 0o600
        # Links of others that carry our names are neither followed nor removed with old files of ours.
        victim = tmp_path / "victim"
        victim.write_text("precious")
        links = [tmp_path / f"{PREFIX}{i}.txt" for i in range(KEEP + 3)]
        for link in links:
            link.symlink_to(victim)
        stacks = collect_stacks(folder, pool.processes, "a test")
        assert (mode(stacks), stacks.is_symlink()) == (0o600, False)
        assert "Thread" in stacks.read_text() or "File " in stacks.read_text()
        assert all(link.is_symlink() for link in links)
        assert victim.read_text() == "precious"
    assert not folder.exists()


def test_only_own_folders_of_dead_processes_are_swept(tmp_path, monkeypatch, open_umask, dead_pid):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    run, victim = tmp_path / "run", tmp_path / "victim"
    for folder in (run, victim):
        folder.mkdir()
    (victim / "file").write_text("precious")

    own = run / f"{DIRECTORY_PREFIX}{dead_pid}-own"
    own.mkdir()
    (own / "store").write_text("x")
    (own / "link").symlink_to(victim, target_is_directory=True)
    link = run / f"{DIRECTORY_PREFIX}{dead_pid}-link"
    link.symlink_to(victim, target_is_directory=True)
    living = run / f"{DIRECTORY_PREFIX}{os.getppid()}-living"
    other = run / f"{DIRECTORY_PREFIX}notes"
    for folder in (living, other):
        folder.mkdir()
    foreign = run / f"{DIRECTORY_PREFIX}{dead_pid}-foreign"
    if os.getuid() == 0:
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)

    made = [make_directory() for _ in range(3)]
    assert len({*made}) == 3
    assert all(mode(folder) == 0o700 and folder.parent == run for folder in made)
    assert not own.exists()
    assert link.is_symlink()
    assert (victim / "file").read_text() == "precious"
    assert living.exists()
    assert other.exists()
    assert foreign.exists() == (os.getuid() == 0)


def test_pools_that_start_at_once_leave_each_other_alone(tmp_path, monkeypatch):
    """A folder is there for a moment before its process remembers that it made it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    make = tempfile.mkdtemp

    def slow(*args, **kwargs):
        made = make(*args, **kwargs)
        time.sleep(0.05)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", slow)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: make_directory(), range(8)))
    assert len(set(made)) == 8
    assert [path for path in made if not path.is_dir()] == []
