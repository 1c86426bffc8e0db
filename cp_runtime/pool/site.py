"""What the ranks of a pool run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WorkerSite:
    """What ranks run, as plain data that JSON knows.

    Args:
        service: module of this package that makes the service of every rank (see `worker.Service`); empty = none.
        arguments: for it.
        path: folders in front of `sys.path`.
        preload: modules to import once, in the process that all ranks are forked from. They must not open a device.
        argv: command line that the code in the ranks sees.
    """

    service: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ("torch",)
    argv: tuple[str, ...] = ("",)
