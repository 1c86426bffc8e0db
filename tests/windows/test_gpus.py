"""GPUs that ComfyUI hides from itself, by a library in the place of the driver's; and the one that a rank sees."""

import ctypes
from types import SimpleNamespace

import pytest

from cp_runtime.system import system


def driver(*gpus):
    """A library with some functions of NVML."""

    def count(target):
        target._obj.value = len(gpus)
        return 0

    def handle(number, target):
        target._obj.value = number + 1
        return 0

    def name(device, buffer, size):
        buffer.value = gpus[device.value - 1][0].encode()[: size - 1]
        return 0

    def memory(device, target):
        target._obj.total = gpus[device.value - 1][1]
        return 0

    def capability(device, major, minor):
        major._obj.value, minor._obj.value = gpus[device.value - 1][2]
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count, nvmlDeviceGetHandleByIndex_v2=handle, nvmlDeviceGetName=name,
        nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetCudaComputeCapability=capability,
    )  # fmt: skip


TWO = (("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9)), ("NVIDIA GeForce RTX 3090", 24 << 30, (8, 6)))


@pytest.mark.parametrize("gpus", [TWO, TWO[:1], ()])
def test_those_that_are_hidden(monkeypatch, gpus):
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: driver(*gpus))
    system.hidden_gpus.cache_clear()
    assert system.hidden_gpus() == (list(gpus) if len(gpus) > 1 else [])
    system.hidden_gpus.cache_clear()


def test_without_a_driver_there_are_none():
    assert system.hidden_gpus() == []


PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as the driver counts
ONE = [(None, TWO, "1", {}), ("0", TWO, "1", PCI), ("3,2", TWO, "2", {}), ("GPU-a, GPU-b", (), "GPU-b", {})]


@pytest.mark.parametrize(("named", "gpus", "own", "more"), ONE)
def test_a_rank_sees_its_own_only(monkeypatch, named, gpus, own, more):
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: driver(*gpus))
    system.hidden_gpus.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert system.visibility_env("cuda:1") == ("cuda:0", {"CUDA_VISIBLE_DEVICES": own, **more})
    assert system.visibility_env("cpu") == ("cpu", {})
    system.hidden_gpus.cache_clear()
