"""The controller of the workers, with real pools and without ComfyUI's models."""

from __future__ import annotations

import os
from pathlib import Path

from support import preloaded

TESTS = Path(__file__).resolve().parents[1]
CODE = """
import comfy.cli_args
comfy.cli_args.args.cpu = True
from support.package import load_package
load_package()
from cp_runtime.controller.controller import Controller
from cp_runtime.controller.placement import Choice
from cp_runtime.controller.shortages import Shortages
from cp_runtime.controller.workers import Resident, Workers
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig
from cp_runtime.pool.protocol import MAX_HEADER

config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), world_size=2)
controller = Controller()
workers = controller.workers = Workers(config, controller.changed.set, Shortages())
workers.pool.start()
key = "x" * (MAX_HEADER + 1)  # no message can carry it: an error that is no PoolError
workers._resident[key] = Resident("x", "u", Choice("whole", ""), asked=("auto", 0.0), call=0.0, device_bytes=0)
controller.unload(key)
assert not workers.pool.alive
print(controller.journal.last_error.message)
"""


def test_unload_raises_nothing_and_ends_the_workers(tmp_path):
    """ComfyUI's queue ends by whatever it raises."""
    program = tmp_path / "controller.py"
    program.write_text(CODE)
    path = os.pathsep.join([os.environ["COMFYUI_PATH"], str(TESTS)])
    done = preloaded.run([str(program)], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "is above the limit" in done.stdout
