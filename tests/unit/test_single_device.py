"""Where there is nothing to share, the reason and the remedy are said."""

import pytest

from cp_runtime.comfy.ui.single_device import single_device_reason
from cp_runtime.pool.config import DeviceInventory


@pytest.mark.parametrize(
    ("devices", "pools", "environment", "words"),
    [
        (("cuda", 2), True, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (("cpu", 0), True, {}, None),  # ranks are CPU processes
        (("cuda", 1), True, {}, "1 GPU visible, nothing to share. If the computer has more, its driver does not show them"),
        (("cuda", 1), True, {"CUDA_VISIBLE_DEVICES": "2"}, "1 GPU visible, nothing to share. CUDA_VISIBLE_DEVICES is 2: "),
        (("npu", 1), True, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, "1 GPU visible, nothing to share. ASCEND_RT_VISIBLE_DEVICES is "),
        (("cuda", 2), False, {}, "One device: sharing a model out needs Linux or Windows"),
    ],
)
def test_why_one_device_computes_alone(devices, pools, environment, words):
    kind, count = devices
    alone = single_device_reason(DeviceInventory(type=kind, count=count), environment, pools)
    if words is None:
        assert alone is None
    else:
        assert alone.words.startswith(words)


@pytest.mark.parametrize(("version", "connects"), [("2.7.1", True), ("2.8.0+cu128", False), ("2.10.0", False), ("2.11.0", True)])
def test_torch_whose_gloo_connects_nothing(version, connects):
    """On Windows."""
    alone = single_device_reason(DeviceInventory(type="cuda", count=2), {}, True, version, ((2, 8), (2, 9), (2, 10)))
    assert (alone is None) == connects
    assert connects or (alone.is_final and alone.words.startswith(f"One device: torch {version} does not connect processes"))
