"""Case 36: a pool has no folder; files with stacks are private, and those of others are left alone."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from support.pools import echo, hold, small_pool

from cp_runtime.errors import PoolTimeout
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.failures import KEEP, PREFIX, collect_stacks
from cp_runtime.version import VERSION


@pytest.fixture
def open_umask():
    """Files are readable by everybody unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_pool_has_no_folder(tmp_path, monkeypatch):
    """Its files have no names: none is left by whatever ends it, and no other process or container can take it for a stale one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_pool() as pool:
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))


def test_files_with_stacks_are_private(tmp_path, monkeypatch, open_umask):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_pool() as pool:
        # Links of others that carry our names are neither followed nor removed with old files of ours.
        victim = tmp_path / "victim"
        victim.write_text("precious")
        links = [tmp_path / f"{PREFIX}{i}.txt" for i in range(KEEP + 3)]
        for link in links:
            link.symlink_to(victim)
        stacks = collect_stacks(pool.inherited.stacks, pool.processes, "a test")
        assert (mode(stacks), stacks.is_symlink()) == (0o600, False)
        assert "Thread" in stacks.read_text() or "File " in stacks.read_text()
        assert VERSION in stacks.read_text()
        assert all(link.is_symlink() for link in links)
        assert victim.read_text() == "precious"


def test_files_with_stacks_that_others_remove_meanwhile_are_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / f"{PREFIX}{number}.txt" for number in range(KEEP + 3)]
    for path in others:
        path.touch()
    look = Path.lstat

    def look_and_lose(path):
        found = look(path)
        if path in others:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "lstat", look_and_lose)
    assert collect_stacks([], [], "a test").read_text().startswith("a test")


@pytest.mark.parametrize("folder", [b"gone", b"\xe9t\xe9"], ids=["not there", "not UTF-8"])
def test_a_pool_starts_whatever_the_folder_for_temporary_files(tmp_path, monkeypatch, folder):
    path = os.path.join(os.fsencode(tmp_path), folder)
    if folder != b"gone":
        os.mkdir(path)
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, os.fsdecode(path))
    monkeypatch.setattr(tempfile, "tempdir", os.fsdecode(path))
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
        hold(pool, 1)
        with pytest.raises(PoolTimeout, match="tacks of") as caught:
            echo(pool, torch.ones(3), timeout=-1.0)
        str(caught.value).encode()  # it goes to browsers


def test_the_description_of_a_rank_is_not_in_its_arguments(tmp_path):
    """Every user can read those, and their length is limited."""
    folders = [str(tmp_path / f"secret-{number}-{'x' * 4000}") for number in range(100)]
    with small_pool(site=WorkerSite(path=tuple(folders))) as pool:
        for pid in pool.pids:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"secret" not in line
            assert len(line) < 1000
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
