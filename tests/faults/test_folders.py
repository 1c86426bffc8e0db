"""Case 36: a pool has no folder."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from support.pools import echo, hold, small_pool

from cp_runtime.errors import PoolTimeout
from cp_runtime.pool.config import WorkerSite


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
        with pytest.raises(PoolTimeout, match="timed out") as caught:
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
