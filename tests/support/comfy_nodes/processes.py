"""Nodes that show what a server and its workers did, and take their memory."""

import re
import sys
import threading
from typing import Any

import comfy.model_management as mm

from .node import node

CONTROLLER = "cp_runtime.comfy.ui.runtime"


@node(latent="LATENT")
def TestWorkerCalls(latent: Any) -> dict[str, Any]:
    """Show how many denoise calls the workers had in the sampling run of `latent`."""
    (module,) = (module for name, module in sys.modules.items() if name.endswith(CONTROLLER))
    sums = module.CONTROLLER.journal.run  # which leaves the first call out, if there were more
    return {"ui": {"text": [str(sums.count + 1)]}}


@node(again=True)
def TestInside(modules: str = "") -> dict[str, Any]:
    """Show the names of the server's threads, and of those modules that a pattern finds."""
    found = [name for name in sys.modules if re.search(modules, name)]
    return {"ui": {"text": [sorted(thread.name for thread in threading.enumerate()), sorted(found)]}}


@node(again=True)
def TestSlowCall(seconds: float = 0.5) -> dict[str, Any]:
    """Say how long a call may take before ranks poll for Cancel inside of it. Shows what it was."""
    (module,) = (module for name, module in sys.modules.items() if name.endswith("cp_runtime.controller.calls"))
    before, module.SLOW_CALL = module.SLOW_CALL, seconds  # type: ignore[attr-defined]
    return {"ui": {"text": [str(before)]}}


@node(again=True)
def TestRoom(more: float = 0.0) -> dict[str, Any]:
    """Have ComfyUI free its device, as it does before it loads something: `more` megabytes beside those that are free now.

    Shows, in megabytes, what is free then.
    """
    device = mm.get_torch_device()
    mm.free_memory(mm.get_free_memory(device) + more * 1e6, device)
    return {"ui": {"text": [str(mm.get_free_memory(device) / 1e6)]}}
