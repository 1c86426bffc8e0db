"""The controller of the workers, with real pools and without ComfyUI."""

from support.pools import make_pool

from cp_runtime.controller.controller import Controller
from cp_runtime.controller.placement import Choice, Resident, Shortages
from cp_runtime.controller.workers import Workers
from cp_runtime.pool.config import WorkerSite
from cp_runtime.pool.messages import MAX_HEADER


def test_unload_raises_nothing_and_ends_the_workers():
    """ComfyUI's queue ends by whatever it raises."""
    controller = Controller(WorkerSite, lambda devices: None)
    workers = controller.workers = Workers(
        make_pool().config, WorkerSite(), controller.journal.changed.set, Shortages(), controller.times
    )
    workers.pool.start()
    key = "x" * (MAX_HEADER + 1)  # no message can carry it: an error that is no PoolError
    resident = Resident("x", "u", Choice("whole", ""), asked=("auto", 0.0), call_bytes=0.0, device_bytes=0, parts={}, stages=0)
    workers.models.resident[key] = resident
    controller.unload(key)
    assert not workers.pool.alive
    assert "is above the limit" in controller.journal.last_error.message
