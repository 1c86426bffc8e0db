"""A rank on a GPU takes few threads, and cores near it."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from cp_runtime.pool import processors

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Cores and a GPU at 0001:3b:0a; returns what was asked for, and the function that says what the system knows of the GPU."""
    asked, card = SimpleNamespace(threads=None, cores=None), tmp_path / "0001:3b:0a.0"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "DEVICES", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(asked, "threads", count))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4, 20)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: setattr(asked, "cores", cores))
    known = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)

    def says(cores):
        card.mkdir()
        (card / "local_cpulist").write_text(cores + "\n")

    return asked, says, known


@pytest.mark.parametrize(("ranks", "threads"), [(1, 4), (2, 4), (4, 3), (8, 1), (64, 1)])
def test_ranks_and_comfyui_share_the_threads(machine, ranks, threads):
    processors.bind_near(torch.device("xpu", 0), ranks)
    assert (machine[0].threads, machine[0].cores) == (threads, None)


def test_the_user_says_how_many_threads(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    processors.bind_near(CUDA, 2)
    assert machine[0].threads is None


@pytest.mark.parametrize(
    ("said", "cores"),
    [("0-7", {4, 5, 6, 7}), ("3,5,12-13", {5, 12, 13}), ("19", {19}), ("0-3", None), ("", None), ("all", None)],
)
def test_cores_near_the_gpu_among_those_that_comfyui_has(machine, said, cores):
    asked, says, _ = machine
    says(said)
    processors.bind_near(CUDA, 2)
    assert asked.cores == cores


def test_without_the_address_or_the_folder_all_cores_stay(machine, monkeypatch):
    asked, says, known = machine
    processors.bind_near(CUDA, 2)
    del known.pci_device_id
    says("4-5")
    processors.bind_near(CUDA, 2)
    assert asked.cores is None


def test_a_container_may_forbid_it(machine, monkeypatch):
    def forbidden(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    machine[1]("4-5")
    processors.bind_near(CUDA, 2)
    assert machine[0].threads == 4


def test_a_call_is_copied_by_one_thread_and_others_have_theirs_back():
    count = torch.get_num_threads()
    for error in (None, ValueError):
        with pytest.raises(error) if error else contextlib.nullcontext(), processors.one_thread():
            assert torch.get_num_threads() == 1
            if error:
                raise error
        assert torch.get_num_threads() == count
