"""The environment of this process: the only module that reads it or writes to it.

Variables are read when they are needed, not on import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

Own = Literal["CP_CONNECT_TIMEOUT", "CP_LOAD_TIMEOUT", "CP_PROFILE", "CP_STARTUP_TIMEOUT", "CP_TEST_ONE_CARD"]
Library = Literal[
    "CUDA_VISIBLE_DEVICES", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"
]  # fmt: skip
HOST = "CP_HOST_"
"""Before the name of another computer."""


def own_setting(name: Own) -> str:
    """Return what the user says to this pack; "" by default."""
    return os.environ.get(name, "")


def library_setting(name: Library) -> str | None:
    """Return what the user says to CUDA, NCCL, OpenMP or torch; None by default."""
    return os.environ.get(name)


def host_setting(name: str) -> str:
    """Return where Python and ComfyUI are on another computer: `HOST` and its name; "" by default."""
    return os.environ.get(name, "") if name.startswith(HOST) else ""


def cache_root() -> str:
    """Return the folder for the caches of this user's programs."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def server_address() -> str:
    """Return the address of this computer by which ssh has reached it. Raises KeyError: no ssh has."""
    return os.environ["SSH_CONNECTION"].split()[2]


def whole_environment() -> dict[str, str]:
    """Return all variables: ranks and ssh start with them."""
    return dict(os.environ)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process, a rank, the environment that its parent has made."""
    os.environ.clear()
    os.environ.update(variables)
