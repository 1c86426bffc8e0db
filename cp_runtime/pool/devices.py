"""The program of a process on another computer that lists its devices and becomes no rank."""

from __future__ import annotations

import json
from typing import Any

import torch

from .config import has_code
from .frames import Frame, Inbox


def run(spec: dict[str, Any], inbox: Inbox) -> None:
    inbox.send(Frame(json.dumps(devices_of(spec["kind"])).encode()))


def devices_of(kind: str) -> list[dict[str, Any]]:
    """Return the devices of a type that torch has code for: each its `name`, torch's `title` for it, and its `memory` in bytes."""
    if kind == "cpu":
        return [{"name": kind, "title": "", "memory": 0}]
    module = getattr(torch, kind, None)  # torch may have none of this type
    found = [module.get_device_properties(number) for number in range(module.device_count())] if module else []
    return [
        {"name": f"{kind}:{number}", "title": str(each.name), "memory": int(each.total_memory)}
        for number, each in enumerate(found)
        if kind != "cuda" or has_code(torch.cuda.get_arch_list(), (each.major, each.minor))
    ]
