"""Reasons why a machine cannot share a model out: panel, node and log all give this answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...pool.config import DeviceInventory

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that hide devices from a process. ComfyUI's --cuda-device and --oneapi-device-selector set some."""
WORDS = {
    "platform": "One device: sharing a model out needs Linux or WSL2.",
    "hidden": "1 GPU visible, nothing to share. {variable} is {value}: if the computer has more GPUs, name them there.",
    "single": "1 GPU visible, nothing to share. If the computer has more, its driver does not show them: look at nvidia-smi -L.",
    "flag": "ComfyUI was started with --cpu. Without it, it uses the GPUs.",
    "torch": "ComfyUI's torch is built without support for GPUs. Install one that has it.",
    "all_hidden": "No GPU visible. {variable} is {value}: name the GPUs there.",
    "none": "No GPU visible. If the computer has some, its driver does not show them: look at nvidia-smi -L.",
}
"""Texts by case. The panel has them in other languages as well."""


@dataclass(frozen=True, kw_only=True)
class SingleDeviceReason:
    """One device computes, whatever the settings ask for; or CPUs do."""

    case: str  # key of WORDS
    # variable, value: of the environment, where it hides devices
    variable: str = ""
    value: str = ""

    @property
    def words(self) -> str:
        return WORDS[self.case].format(variable=self.variable, value=self.value)

    @property
    def described(self) -> dict[str, Any]:
        """The reason for the browser: in words, and their parts."""
        return {**asdict(self), "words": self.words}


def single_device_reason(
    inventory: DeviceInventory, platform: str = sys.platform, environment: Mapping[str, str] = os.environ
) -> SingleDeviceReason | None:
    """Return why one device computes alone on this machine; None = there are several, or CPU ranks."""
    if platform != "linux":
        return SingleDeviceReason(case="platform")
    if inventory.default_ranks > 1:
        return None
    hiding = next((name for name in HIDING if environment.get(name)), None)
    return (
        SingleDeviceReason(case="single")
        if hiding is None
        else SingleDeviceReason(case="hidden", variable=hiding, value=environment[hiding])
    )


def why_no_gpu(
    inventory: DeviceInventory, flag: bool, built: bool, environment: Mapping[str, str] = os.environ
) -> SingleDeviceReason | None:
    """Return why ranks are CPU processes; None = there are accelerators. `flag`: --cpu was given; `built`: torch supports GPUs."""
    if inventory.type != "cpu":
        return None
    if flag or not built:
        return SingleDeviceReason(case="flag" if flag else "torch")
    hiding = next((name for name in HIDING if name in environment), None)
    return (
        SingleDeviceReason(case="none")
        if hiding is None
        else SingleDeviceReason(case="all_hidden", variable=hiding, value=environment[hiding] or '""')
    )
