"""Where there is nothing to share, the reason and the remedy are said."""

import pytest

from cp_runtime.comfy.ui.single_device import single_device_reason
from cp_runtime.pool.config import DeviceInventory


@pytest.mark.parametrize(
    ("devices", "platform", "environment", "words"),
    [
        (("cuda", 2), "linux", {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (("cpu", 0), "linux", {}, None),  # ranks are CPU processes
        (("cuda", 1), "linux", {}, "1 GPU visible, nothing to share. If the computer has more, its driver does not show them"),
        (("cuda", 1), "linux", {"CUDA_VISIBLE_DEVICES": "2"}, "1 GPU visible, nothing to share. CUDA_VISIBLE_DEVICES is 2: "),
        (("npu", 1), "linux", {"ASCEND_RT_VISIBLE_DEVICES": "3"}, "1 GPU visible, nothing to share. ASCEND_RT_VISIBLE_DEVICES is "),
        (("cuda", 2), "win32", {}, "One device: sharing a model out needs Linux or WSL2"),
    ],
)
def test_why_one_device_computes_alone(devices, platform, environment, words):
    kind, count = devices
    alone = single_device_reason(DeviceInventory(type=kind, count=count), platform, environment)
    if words is None:
        assert alone is None
    else:
        assert alone.words.startswith(words)
