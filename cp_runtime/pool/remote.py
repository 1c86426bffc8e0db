"""The first steps of a rank on another computer, before any import: it reports what is installed, and picks a network interface."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ..system.environment import server_address, whole_environment
from ..system.interfaces import interface_of
from .facts import facts_of
from .frames import Frame, Inbox

MARK = b"\0context parallel\0"  # before the first frame: a shell may print something when it starts
# Network interfaces of gloo, NCCL, Intel's oneCCL and Ascend's HCCL.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CCL_KVS_IFACE", "HCCL_SOCKET_IFNAME")
_FOLDERS = ("base", "models", "input", "output", "temp", "user")
_FILES = ("extra-model-paths-config", "front-end-root", "database-url", "tls-keyfile", "tls-certfile")
_PATHS = (*(f"--{name}-directory" for name in _FOLDERS), *(f"--{name}" for name in _FILES))


def prepare(inbox: Inbox, site: dict[str, Any]) -> dict[str, str]:
    """Report this process's id and what is installed here; return the environment of a rank on this computer. `site`: see
    `processes.site_message`; its first folder is ComfyUI's."""
    site["argv"] = without_paths(site["argv"])
    inbox.begin(MARK)
    inbox.send(Frame(json.dumps({"pid": os.getpid(), "facts": facts_of(next(iter(site["path"]), ""))}).encode()))
    return whole_environment() | dict.fromkeys(INTERFACES, interface_of(server_address(), "lo"))


def without_paths(options: Sequence[str]) -> list[str]:
    """Return ComfyUI's options without those that name folders and files of another computer."""
    kept, drops = [], False
    for option in options:
        drops = option.partition("=")[0] in _PATHS if option.startswith("--") else drops
        if not drops:
            kept.append(option)
    return kept
