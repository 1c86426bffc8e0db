"""Reasons why a machine cannot share a model out: panel, node and log all give this answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...pool.config import DeviceInventory
from ...system import HAS_POOLS, system
from ...system.environment import whole_environment
from ...words import ENGLISH, Words, words_in

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that hide devices from a process. ComfyUI's --cuda-device and --oneapi-device-selector set some."""


@dataclass(frozen=True, kw_only=True)
class SingleDeviceReason:
    """One device computes, or CPUs do, regardless of the settings."""

    case: str  # key of its text, of "alone"
    # variable, value: of the environment, where it hides devices; value: torch's version, where that is the reason
    variable: str = ""
    value: str = ""

    def said(self, words: Words) -> str:
        return words.say(f"alone.{self.case}", variable=self.variable, value=self.value)

    @property
    def words(self) -> str:
        return self.said(words_in(ENGLISH))

    @property
    def is_final(self) -> bool:
        """Whether no setting helps."""
        return self.case in ("platform", "torch_version")

    @property
    def described(self) -> dict[str, Any]:
        """The reason for the browser: in words, and their parts."""
        return {**asdict(self), "words": self.words}


def single_device_reason(
    inventory: DeviceInventory,
    environment: Mapping[str, str] | None = None,
    has_pools: bool = HAS_POOLS,
    torch_version: str = str(torch.__version__),
    broken: Sequence[tuple[int, ...]] = system.BROKEN_GLOO,
) -> SingleDeviceReason | None:
    """Return why one device computes alone on this machine; None = there are several, or CPU ranks."""
    if not has_pools:
        return SingleDeviceReason(case="platform")
    if tuple(map(int, torch_version.split(".")[:2])) in broken:
        return SingleDeviceReason(case="torch_version", value=torch_version)
    if inventory.default_ranks > 1:
        return None
    environment = whole_environment() if environment is None else environment
    hiding = next((name for name in HIDING if environment.get(name)), None)
    return (
        SingleDeviceReason(case="single")
        if hiding is None
        else SingleDeviceReason(case="hidden", variable=hiding, value=environment[hiding])
    )


def why_no_gpu(
    inventory: DeviceInventory, flag: bool, built: bool, environment: Mapping[str, str] | None = None
) -> SingleDeviceReason | None:
    """Return why ranks are CPU processes; None = there are accelerators. `flag`: --cpu was given; `built`: torch supports GPUs."""
    if inventory.type != "cpu":
        return None
    if flag or not built:
        return SingleDeviceReason(case="flag" if flag else "torch")
    environment = whole_environment() if environment is None else environment
    hiding = next((name for name in HIDING if name in environment), None)
    return (
        SingleDeviceReason(case="none")
        if hiding is None
        else SingleDeviceReason(case="all_hidden", variable=hiding, value=environment[hiding] or '""')
    )
