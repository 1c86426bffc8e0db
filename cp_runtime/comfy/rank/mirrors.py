"""The models on a worker rank: copies of those of ComfyUI's process, patched with its weight patches.

Importing this brings up ComfyUI: see `service`.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from mmap import mmap
from typing import Any

import comfy.sd  # noqa: F401  (slow: now, and not at the first load)
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...engine.cost import DegreePlanner
from ...engine.ranks.mesh import BatchMesh, SequenceMesh
from ...engine.weights.blocks import sizes_of
from ...errors import CompileError, MirrorError, PatchInterrupt
from ...families import plan_for
from ...nested import is_plain_storage_subclass, map_tensors, stored, tensors
from ...pool.messages import AttachNetwork, Call, CallOutcome, Describe, Described, Load, Loaded, Room, Staged
from ...pool.protocol import read_tensor
from ...pool.settings import OFFLOADED, STAGED, WHOLE
from ...pool.tensor_cache import owned
from ...system import system
from ..shared.fingerprint import code_of, digest_of, found
from ..shared.formats import formats_of
from ..shared.values import Facts
from ..shared.weights import weight_patches_digest
from .batch import CallPart, Given, part_of, take_items
from .files import OwnFiles
from .forward import run_sharded, run_staged
from .memory import (
    LoadProgress,
    MappedWeightsPatcher,
    Pages,
    ShardedWeightsPatcher,
    StagedWeightsPatcher,
    available,
    forget,
    patcher_over,
    range_of,
    room,
)
from .model import Mirror
from .noted import HELD
from .objects import read_leaves, read_model
from .packs import FAILED, import_packs
from .patches import ATTACHED, PLACES
from .quantised import multiplied_natively, own_formats, shared_scales
from .texts import texts_that_fit

log = logging.getLogger("context_parallel.worker")

SPARE = 4  # weights get memory back once calls need less than 1/SPARE of theirs. Calls of one run differ by less
ALONE = {"ulysses": 1, "ring": 1, "batch": 1}


class Mirrors:
    """All models on this rank, by their key."""

    def __init__(self, device: torch.device, progress: LoadProgress) -> None:
        self.device, self.progress = device, progress
        self.entries: dict[str, Mirror] = {}
        self.files = OwnFiles()

    def load(self, request: Load, block: Tensor, mapped: Callable[[], list[mmap] | None], mesh: BatchMesh) -> Loaded:
        """Take a request's model if it is new, and its patches. The next call moves both.

        Args:
            block: network and patches; their tensors stay there.
            mapped: maps the memory of the weights; None = this rank cannot.
        """
        began = time.perf_counter()
        import_packs(request.packs)
        key, placement = request.key, request.placement
        if key in self.entries and (self.entries[key].placement, self.entries[key].shared) != (placement, request.shared):
            self.drop([key])
        mirror = self.entries.get(key)
        if mirror is None:
            log.info("loading %s", request.name)
            memory = self.files.memory(request, block, mapped())
            value = read_tensor(block, request.network).numpy().tobytes()
            network, kind, settings, facts, classes = read_model(value, memory, self.device)
            patcher = patcher_over(network, kind, settings, facts, self.device)
            ranks = None if placement == WHOLE else mesh.sequence().weights
            shown = [(range_of(each), is_file) for each, is_file in memory.buffers if is_file is not None]
            pages = Pages([each for each, _ in shown], [each for each, is_file in shown if not is_file])
            if placement == STAGED:
                stage, plan = mesh.stage(request.stages), plan_for(network)
                StagedWeightsPatcher.stage(patcher, pages, facts, plan, stage, mesh.stage_shares(request.stages), self.progress)
            elif ranks is None:
                MappedWeightsPatcher.adopt(patcher, pages, facts, self.progress)
            else:
                ShardedWeightsPatcher.adopt(patcher, pages, facts, self.progress)
                patcher.shard(ranks, request.device_bytes, request.shared, on_host=placement == OFFLOADED)
            formats, cast = own_formats(patcher.model, facts, self.device, request.formats)
            nbytes = sum(part.nbytes for weight in patcher.model.parameters() for part in stored(weight))
            names = frozenset(patcher.model.state_dict())
            mirror = Mirror(patcher, names, placement, nbytes, formats, classes, memory.files, cast, request.shared)
        self._patch(mirror, request, block)
        self.entries[key] = mirror
        return Loaded(
            digest=weight_patches_digest(request, block[: request.memory_nbytes]),
            formats=mirror.formats,
            casts=bool(mirror.cast),
            code=digest_of(self._code(mirror, request.roots)),
            bytes=model_management.module_size(mirror.patcher.model),
            seconds=time.perf_counter() - began,
        )

    def describe(self, request: Describe) -> Described:
        import_packs(request.packs)
        return Described(code=dict(self._code(self.entries.get(request.key), request.roots)), failed=dict(FAILED))

    def _code(self, mirror: Mirror | None, roots: Iterable[str]) -> Mapping[str, str]:
        return code_of(() if mirror is None else mirror.classes, {name: found(name) for name in roots}).hashes

    def call(
        self,
        request: Call,
        arguments: dict[str, Any],
        mesh: BatchMesh,
        planner_for: Callable[[SequenceMesh, list[list[int]]], DegreePlanner],
        on_module: Callable[[], None],
        on_run: Callable[[], bool] = lambda: True,
    ) -> tuple[Any, CallOutcome]:
        """Run the model's forward with `arguments` (by name) on as many ranks as the request says.

        Args:
            planner_for: mesh of the ranks that share a sequence, ranks of all groups -> planner of the call.
            on_module: called at every planned module.
            on_run: called at every run of the forward, where several follow each other; returns whether the next one will surely
                take place.

        Returns:
            the output, and the outcome of the call. No output on an idle rank.
        """
        began = time.perf_counter()
        mirror = self.mirror_of(request.key)
        if not request.repeats:
            HELD.begin(request.dropped, request.is_repeated, request.restores)
        part = part_of(mirror.installed.plan, request, arguments, mesh, alone=request.ranks == 1 and mirror.placement != WHOLE)
        if part is None:
            return None, CallOutcome(
                idle=True, degrees=ALONE, at_work=request.ranks, room=room(self.device), compiled=mirror.compilation
            )
        given = self._prepare(mirror, request, part, arguments)
        planner = planner_for(part.sequence, part.mesh.members(part.shares.groups))
        prelude = time.perf_counter() - began
        # Not inference_mode, which does not count changes in place: see `CallState.once`.
        scales = shared_scales(part.mesh.whole) if mirror.formats else nullcontext()
        held = HELD.as_before() if request.repeats else nullcontext()
        native = multiplied_natively(mirror.cast) if request.natively else nullcontext()
        with torch.no_grad(), scales, native, held, texts_that_fit(given.arguments):
            try:
                return self._run(mirror, request, part, given, planner, (on_module, on_run), prelude)
            except model_management.InterruptProcessingException as error:  # no Exception: it would end the rank
                raise PatchInterrupt("code of a node interrupted the prompt") from error

    def held(self, number: int) -> Tensor:
        """Return a tensor that patches have noted. Raises MirrorError: it is not here any more."""
        return HELD[number]

    def _prepare(self, mirror: Mirror, request: Call, part: CallPart, arguments: dict[str, Any]) -> Given:
        """Move the weights to the device, and leave room for the call; return this rank's part of the arguments."""
        taken = take_items(part.shares, arguments, part.mesh.index(part.shares.groups))
        in_place = {name: taken.pop(name) for name in request.in_place if name in taken}  # `LocalResiduals` copies even less
        latent = next(tensor.shape for name in request.leading for tensor in tensors(taken[name]))
        needed = request.memory[latent[0] - 1] * request.memory_scale * part.sequence.part
        self.free_buffers(keep=mirror)
        self.to_device(mirror, needed)
        mirror.compile(request.compile, _raise if request.compile_or_raise else _go_on)
        return Given(taken, in_place)

    def _run(
        self,
        mirror: Mirror,
        request: Call,
        part: CallPart,
        given: Given,
        planner: DegreePlanner,
        notes: tuple[Callable[[], None], Callable[[], bool]],
        prelude: float,
    ) -> tuple[Any, CallOutcome]:
        """Run the forward, in stages or not; return as `call` does. `notes`: its `on_module` and `on_run`."""
        forward, settings = getattr(mirror.model, request.method), request.pipeline

        def own() -> dict[str, Any]:
            return {**owned(given.arguments, self.device), **given.in_place}

        staged: Staged | None = None
        if settings is None or part.stage is None:
            out, state = run_sharded(mirror.installed, forward, own(), part.sequence, planner, notes[0], mirror.weights)
        else:
            pipeline = mirror.pipeline(part.stage, part.everyone, self.device)
            out, state = run_staged(
                mirror.installed,
                pipeline,
                forward,
                own(),
                part.sequence,
                planner,
                settings,
                request.leading,
                part.by_items,
                *notes,
            )
            staged = Staged(**pipeline.described(settings))
        ring, ulysses = planner.chosen or (1, 1)
        return part.mesh.gather(part.shares, map_tensors(out, _undressed)), CallOutcome(
            degrees={"ulysses": ulysses, "ring": ring, "batch": part.shares.groups, **(staged.degrees if staged else {})},
            at_work=part.shares.groups * planner.ranks * (1 if settings is None else settings.stages),
            tokens={name: held for name, (_, held) in state.tokens().items()},
            room=room(self.device),
            compiled=mirror.compilation,
            predicted_seconds=planner.seconds,
            predicted_bytes=planner.bytes_sent,
            prelude=prelude,
            staged=staged,
            **({} if request.repeats or state.noted is None else state.noted.told()),
        )

    def free_buffers(self, keep: Mirror | None = None) -> None:
        for mirror in self.entries.values():
            if mirror is not keep:
                mirror.free_buffers()

    def device_room(self) -> Room:
        return Room(available=available(self.device), formats=tuple(formats_of(self.device)))

    def to_device(self, mirror: Mirror, needed: float, *, networks: bool = True) -> None:
        """Move weights, patched, and (with `networks`) other nodes' networks to the device. Leave `needed` bytes free."""
        patcher = mirror.patcher
        wanted = [patcher, *(ATTACHED.values() if networks else ())]
        loaded = {id(loaded.model) for loaded in model_management.current_loaded_models}
        there = patcher.model.current_weight_patches_uuid == patcher.patches_uuid and all(id(each) in loaded for each in wanted)
        if not there or room_changes(mirror.reserved, needed, patcher.model.model_lowvram):
            with self.progress.loading(mirror.nbytes):
                model_management.load_models_gpu(wanted, memory_required=needed)
            mirror.reserved = needed

    def attach_network(self, request: AttachNetwork, block: Tensor, mesh: BatchMesh) -> None:
        """Take a network for other nodes' patches, or a ControlNet's; its tensors stay in `block`. The next call moves it to the
        device."""
        network = read_leaves([read_tensor(block, leaf) for leaf in request.leaves], self.device)
        patcher = ATTACHED[request.key] = ModelPatcher(network, load_device=self.device, offload_device=torch.device("cpu"))
        known = [(block.data_ptr(), block.data_ptr() + block.nbytes)]
        pages, facts = Pages(known, known), Facts.of(network)
        if request.placement == WHOLE:
            MappedWeightsPatcher.adopt(patcher, pages, facts, self.progress)
        else:
            ranks, on_host = mesh.sequence().weights, request.placement == OFFLOADED
            ShardedWeightsPatcher.adopt(patcher, pages, facts, self.progress)
            patcher.shard(ranks, sizes_of(network).per_rank(ranks.size, on_host=on_host), on_host=on_host)

    def drop(self, keys: Iterable[str]) -> None:
        """Drop models and networks of patches. Host and device memory is freed; files stay in the page cache."""
        for key in keys:  # without names for them: a named object cannot be collected
            if key in self.entries:
                self.entries.pop(key).drop()
            if key in ATTACHED:
                forget(ATTACHED.pop(key))
        PLACES.clear()
        gc.collect()  # modules and hooks refer to each other
        model_management.soft_empty_cache()
        system.trim_heap()

    def make_room(self, key: str | None) -> None:
        """Free cached device memory. With `key` that model and all networks leave the device until their next call."""
        self.free_buffers()
        leaving = [] if key is None else [self.mirror_of(key).patcher, *ATTACHED.values()]
        for loaded in list(model_management.current_loaded_models):
            if any(loaded.model is patcher for patcher in leaving):
                loaded.model_unload()
                model_management.current_loaded_models.remove(loaded)
        model_management.soft_empty_cache()

    def mirror_of(self, key: str) -> Mirror:
        mirror = self.entries.get(key)
        if mirror is None:
            raise MirrorError("the model of this call is not loaded on the workers")
        for file in mirror.files:
            file.check()
        return mirror

    def _patch(self, mirror: Mirror, request: Load, block: Tensor) -> None:
        patches = read_leaves([read_tensor(block, leaf) for leaf in request.patches], self.device)
        unknown = patches.keys() - mirror.names
        if unknown:
            raise MirrorError(f"{len(unknown)} patched weights do not exist on the workers, the first is {min(unknown)}")
        mirror.patcher.patches, mirror.patcher.patches_uuid = patches, request.patches_uuid


def room_changes(reserved: float, needed: float, offloaded: bool) -> bool:
    """Return whether to redistribute the weights between device and host. `reserved`, `needed`: bytes for calls, then and now."""
    return needed > reserved or (offloaded and needed * SPARE < reserved)


def _undressed(result: Tensor) -> Tensor:
    """Return a result without the class of a node pack's weights that it was computed with."""
    return result.as_subclass(Tensor) if is_plain_storage_subclass(result) else result


def _raise(error: CompileError) -> None:
    raise error


def _go_on(error: CompileError) -> None:
    """Continue without compilation: the report of the call lists the uncompiled blocks."""
