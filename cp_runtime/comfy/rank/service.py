"""A rank's work for ComfyUI: the commands of the pool's service. Imported in worker processes only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.options
from torch import Tensor

from ...comfyui import forbid_recording
from ...compat import on_compilation
from ...engine.cost import DegreePlanner
from ...engine.ranks.profiling import CallTraces
from ...pool.messages import (
    AttachNetwork,
    Available,
    Call,
    CallReport,
    Describe,
    Drop,
    Fetch,
    Load,
    Loaded,
    Locate,
    MakeRoom,
    Request,
)
from ...pool.worker import Handler, Worker
from ..shared.pictures import METHODS

if TYPE_CHECKING:
    from .mirrors import Mirrors


def make_service(worker: Worker) -> Mapping[type[Request[Any]], Handler]:
    """Return the handlers of a rank's service, by kind of request."""
    comfy.options.enable_args_parsing()  # of the UI process's arguments
    from comfy import cli_args

    cli_args.args.cpu |= worker.device.type == "cpu"  # ComfyUI picks its device when it is imported, which is now
    forbid_recording(cli_args.args)
    from .memory import LoadProgress
    from .mirrors import Mirrors

    return ModelService(worker, Mirrors(worker.device, LoadProgress(worker.loading_hook()))).handlers


class ModelService:
    """A service that loads models and runs their forward. `worker`: the rank. `mirrors`: its models."""

    def __init__(self, worker: Worker, mirrors: Mirrors) -> None:
        self._worker, self._mirrors = worker, mirrors
        self._traces = CallTraces(worker.rank)
        self._told_when_compiling = False

    @property
    def handlers(self) -> Mapping[type[Request[Any]], Handler]:
        mirrors = self._mirrors
        return {
            Locate: lambda request, _: mirrors.files.locate(request),
            Load: self._load,
            AttachNetwork: self._attach,
            Describe: lambda request, _: mirrors.describe(request),
            Drop: self._drop,
            Call: self._call,
            Fetch: lambda request, _: self._worker.result(mirrors.held(request.number)),
            MakeRoom: self._make_room,
            Available: lambda *_: mirrors.device_room(),
        }

    def _load(self, request: Load, block: Tensor) -> Loaded:
        kept = self._worker.keep(request.memory, block)
        return self._mirrors.load(request, kept, partial(self._worker.mapped, request.blocks), self._worker.mesh)

    def _attach(self, request: AttachNetwork, block: Tensor) -> None:
        self._mirrors.attach_network(request, self._worker.keep(request.memory, block), self._worker.mesh)

    def _drop(self, request: Drop, _: Tensor) -> None:
        self._worker.cache.clear()
        self._mirrors.drop(request.keys)

    def _make_room(self, request: MakeRoom, _: Tensor) -> None:
        if request.key is not None:
            self._worker.cache.clear()
        if self._worker.rank in request.ranks:
            self._mirrors.make_room(request.key)

    def _call(self, request: Call, block: Tensor) -> CallReport:
        worker = self._worker
        began = time.perf_counter()
        arguments = worker.cache.unpack(request, block)
        worker.begin_figures()
        if request.compile and not self._told_when_compiling:
            on_compilation(worker.compiling)
            self._told_when_compiling = True
        on_module = worker.module_hook(request.cancel_every)
        with self._traces.call():
            if request.method in METHODS:
                from .pictures import call_on_pictures  # brings up ComfyUI, as the mirrors have

                out, outcome = call_on_pictures(self._mirrors, request, arguments, worker.mesh, on_module)
            else:
                out, outcome = self._mirrors.call(
                    request,
                    arguments,
                    worker.mesh,
                    lambda mesh, groups: DegreePlanner(request.sequence, mesh.size, worker.measured.of(*groups), mesh.shares),
                    on_module,
                    worker.run_point,
                )
            result = worker.result(out)
        return worker.report(result, outcome, began)
