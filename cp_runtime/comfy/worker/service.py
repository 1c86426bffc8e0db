"""What a rank does for ComfyUI: the commands of the pool's service. Imported in worker processes only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import comfy.options
from torch import Tensor

from ...compat import on_compilation
from ...engine.config import SequenceSettings
from ...engine.cost import DegreePlanner
from ...engine.profiling import CallTraces
from ...pool.faults import inject
from ...pool.worker import Handler, Worker
from ..wire.vae import VAE_METHODS

if TYPE_CHECKING:
    from .mirrors import Mirrors


def make_service(worker: Worker, arguments: Mapping[str, Any]) -> ModelService:
    """The service of a rank. `arguments`: `model_folders`, from which alone models are loaded; `node_folders` of node packs."""
    comfy.options.enable_args_parsing()  # of the UI process's arguments
    from comfy import cli_args

    cli_args.args.cpu |= worker.device.type == "cpu"  # ComfyUI picks its device when it is imported, which is now
    from .mirrors import Mirrors
    from .progress import LoadProgress

    progress = LoadProgress(worker.loading_hook())
    mirrors = Mirrors(worker.device, arguments["model_folders"], progress, arguments.get("node_folders", ()))
    return ModelService(worker, mirrors)


class ModelService:
    """Loads models and runs their forward.

    Args:
        worker: the rank.
        mirrors: its models.
    """

    def __init__(self, worker: Worker, mirrors: Mirrors) -> None:
        self._worker, self._mirrors = worker, mirrors
        self._traces = CallTraces.from_environment(worker.rank)
        self._told_when_compiling = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By command."""
        return {
            "load": self._load,
            "attach_network": self._attach_network,
            "drop": self._drop,
            "call": self._call,
            "unload": self._unload,
            "make_room": self._make_room,
            "available": self._available,
        }

    def _load(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        kept = self._worker.keep(block)
        inject(self._worker.rank, "load")
        return self._mirrors.load(header, kept, self._worker.mesh)

    def _attach_network(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        self._mirrors.attach_network(header, block)
        return {}

    def _drop(self, header: dict[str, Any], _: Tensor) -> dict[str, Any]:
        self._mirrors.drop(header["keys"])
        return {}

    def _unload(self, header: dict[str, Any], _: Tensor) -> dict[str, Any]:
        self._worker.cache.clear()
        self._mirrors.unload(header["key"])
        return {}

    def _make_room(self, header: dict[str, Any], _: Tensor) -> dict[str, Any]:
        if header["key"] is not None:
            self._worker.cache.clear()
        if self._worker.rank in header["ranks"]:
            self._mirrors.make_room(header["key"])
        return {}

    def _available(self, _: dict[str, Any], __: Tensor) -> dict[str, Any]:
        return {"available": self._mirrors.available()}

    def _call(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        worker = self._worker
        began = time.perf_counter()
        arguments = worker.cache.unpack(header, block)
        worker.begin_figures()
        settings = SequenceSettings(**header["sequence"])
        if header["compile"] and not self._told_when_compiling:
            on_compilation(worker.compiling)
            self._told_when_compiling = True
        on_module = worker.module_hook(header["cancel_every"])
        with self._traces.call():
            if header["method"] in VAE_METHODS:
                from .vae import call_vae  # brings up ComfyUI, as the mirrors have

                out, done = call_vae(self._mirrors, header, arguments, worker.mesh, on_module)
            else:
                out, done = self._mirrors.call(
                    header,
                    arguments,
                    worker.mesh,
                    lambda mesh, members: DegreePlanner(settings, mesh.size, worker.measured.of(members), mesh.shares),
                    on_module,
                )
            reply = worker.result(out)
        return {**reply, **done, **worker.figures(began)}
