"""A node that leaves a child process behind, to test that no process of a server outlives a test."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


class TestChild:
    """Start a process in a session of its own that sleeps for ten minutes, with `marker` on its command line."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"marker": ("STRING", {"default": "test_child"})}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "spawn"
    CATEGORY = "test"

    def spawn(self, marker: str) -> dict[str, Any]:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", marker], start_new_session=True)
        return {"ui": {}}
