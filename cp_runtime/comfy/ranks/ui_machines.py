"""Other machines that work for this ComfyUI. Nothing listens or runs before someone asks for it."""

from __future__ import annotations

import logging
import os
from typing import Any

import comfy.model_management
import folder_paths

from ...errors import ContextParallelError
from ...machines.facts import facts_of
from ...machines.host import Machines
from ...machines.wire import parse_address
from ..model.wire_places import describe

log = logging.getLogger("context_parallel")
VARIABLE = "CP_MACHINES"
"""Environment variable with the address and port to listen on for other machines."""


def _facts() -> dict[str, Any]:
    root = os.path.dirname(os.path.abspath(folder_paths.__file__))
    return facts_of(root, comfy.model_management.get_torch_device().type)


def _describe(recipe: dict[str, Any]) -> dict[str, Any]:
    return describe(recipe, {kind: found for kind, (found, _) in folder_paths.folder_names_and_paths.items()})


def _busy() -> bool:
    """Return whether a prompt runs."""
    from server import PromptServer

    queue = getattr(getattr(PromptServer, "instance", None), "prompt_queue", None)
    return bool(queue is not None and queue.currently_running)


OTHERS = Machines(_facts, _busy, _describe, "comfy.model.wire_places")


def add_machines(address: str) -> str:
    """Listen for other machines on `address:port`, and return the code for them. Raises ContextParallelError."""
    return str(OTHERS.open(*parse_address(address)))


def add_if_asked() -> None:
    """Listen for other machines where ComfyUI's environment says so, and put the code into the log."""
    if address := os.environ.get(VARIABLE, "").strip():
        try:
            code = add_machines(address)
        except ContextParallelError as error:
            log.error("%s", error)
            return
        program = "custom_nodes/comfyui-context-parallel/cp_runtime/machines/join.py"
        log.warning("another computer can work for this ComfyUI. In its ComfyUI's folder: python %s %s", program, code)
