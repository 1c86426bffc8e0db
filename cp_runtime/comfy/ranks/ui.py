"""The controller of this process: the one owner of its ranks."""

from __future__ import annotations

import atexit

from ...controller.controller import Controller
from ..memory.ui_residency import free_for_ranks
from .ui_site import worker_site

CONTROLLER = Controller(worker_site, free_for_ranks)
atexit.register(CONTROLLER.close)
