"""The MODEL that Apply Context Parallel returns. To ComfyUI's memory manager and samplers it is an ordinary ModelPatcher; its
weights are on the workers, and denoise calls go there. Also the node of a graph that waits for them, its progress bar, and Cancel.

Everything of the UI process's `BaseModel` but the transformer's forward is used as it is: model sampling, conditioning, latent
format, object patches on them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from torch import nn

from ...controller.calls import ModelCall
from ...controller.run_stats import Node
from ...errors import MirrorError, UnsupportedError
from ...families import PLANS, class_name
from ...pool.config import RuntimeConfig
from ..shared.patches import applied_patches, changes_shape
from ..shared.values import Value
from ..shared.weights import PREFIX, READ_HERE, is_dynamic
from .controlnets import ControlNets
from .copies import copies_of
from .fingerprints import OF_MODEL, ModelFingerprint
from .interception import OnOneDevice, intercept, release
from .names import kind_of, name_of
from .notes import ON_RANKS, notes_of, on_ranks
from .obstacles import check_model, check_stages
from .progress import WorkBar, with_cancel
from .residency import convert, free_ui_memory, give_back
from .runtime import CONTROLLER
from .target import Target
from .values import value_of

log = logging.getLogger("context_parallel")

FEW_STEPS = 8
RUNS = itertools.count(1)


class Run(NamedTuple):
    """A sampling run.

    Args:
        number: of the run in this process.
        obstacle: the part of its conditions that cannot be sent to the workers.
        call_memory: bytes that ComfyUI expects a call to take on one device.
        memory_scale: see `ModelCall.memory_scale`.
        watched: foreign code takes part, see `watching`.
        controlnets: of its conditions.
    """

    number: int = 0
    obstacle: str | None = None
    call_memory: float = 0.0
    memory_scale: float = 1.0
    watched: bool = False
    controlnets: ControlNets = ControlNets()


class ContextParallelPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose weights are on the worker pool.

    The last patcher loaded computes, as with ComfyUI's own patchers, whose patches are in the weights then: also where a node loads
    a clone and drops it at once. The clone and all patchers that it derives from share `cp_loaded`, a copy of it without the model:
    so the model's references do not keep it alive.

    Attributes:
        cp_config: pool and sharding.
        cp_run: the sampling run.
        cp_loaded: see above.
    """

    cp_config: RuntimeConfig
    cp_run = Run()
    cp_loaded: ContextParallelPatcher | None = None
    patches: dict[str, Any]
    _noted_run: int = 0

    @classmethod
    def over(cls, patcher: comfy.model_patcher.ModelPatcher, config: RuntimeConfig) -> Any:
        """Make one over the same model, even if DynamicVRAM manages it: ComfyUI cannot page memory on the ranks. Raises
        UnsupportedError if this ComfyUI pages the memory of every model."""
        made: Any = patcher.clone(disable_dynamic=True, model_override=patcher.get_clone_model_override())
        if made.is_dynamic():
            raise UnsupportedError(
                "ComfyUI made no static copy of the model for the workers. Start it with --disable-dynamic-vram, or update this "
                "extension."
            )
        made.__class__ = _over(cls, plain_class(type(made)))  # type: ignore[arg-type]
        made.cp_config = config
        return made

    def clone(self, *args: Any, **kwargs: Any) -> ContextParallelPatcher:
        clone: Any = super().clone(*args, **kwargs)
        if type(clone) is plain_class(type(self)):  # some packs' patchers always clone to their own class
            clone.__class__ = type(self)
        if isinstance(clone, ContextParallelPatcher):
            # Not `model_size`, as it may run on one device.
            clone.cp_config, clone.cp_run, clone.size = self.cp_config, self.cp_run, self.size
        return clone

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("_model", lambda: None)() if name == "model" else None
        if model is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return model

    def __del__(self) -> None:
        if "model" in vars(self):
            super().__del__()

    def _as_loaded(self) -> Any:
        loaded = object.__new__(type(self))
        changed = {"patches": applied_patches(self), "parent": None, "cp_loaded": None, "_model": ref(self.model)}
        loaded.__dict__ = {**vars(self), **changed}
        del loaded.model
        holder: Any = self
        while isinstance(holder, ContextParallelPatcher):
            holder.cp_loaded, holder = loaded, holder.parent
        return loaded

    @property
    def cp_local(self) -> bool:
        """Whether the model runs in this process on one device, because on_unsupported says so."""
        return notes_of(self.model).local

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None:
        if key == COMPILE_KEY and not isinstance(wrapper, OnOneDevice):
            wrapper = OnOneDevice(wrapper)
        super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def inject_model(self) -> None:
        if self.cp_local:  # else the ranks inject, for the time of every call
            super().inject_model()

    def eject_model(self) -> None:
        super().eject_model()
        if self.cp_loaded is not None:  # which a refused call has loaded into this process
            self.cp_loaded.eject_model()

    # --- calls by the memory manager ------------------------------------------------------------------------------------

    def model_size(self) -> int:
        """Return the model's bytes on this process's device: 0 if no rank uses it; less than the whole if sharded."""
        if not self.cp_local and str(self.load_device) not in self.cp_config.devices:
            return 0
        resident = None if self.cp_local else CONTROLLER.resident(notes_of(self.model).key)
        return super().model_size() if resident is None else resident.device_bytes

    def loaded_size(self) -> int:
        if self.cp_local:
            return super().loaded_size()
        return self.model_size() if self._on_device() else 0

    def current_loaded_device(self) -> torch.device:
        if self.cp_local:
            return super().current_loaded_device()
        return self.load_device if self._on_device() else self.offload_device

    def lowvram_patch_counter(self) -> int:
        return super().lowvram_patch_counter() if self.cp_local else 0

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that a call may take. Samplers use it to decide how many CFG halves, items and areas to compute at once.

        This process only sees rank 0's device, where memory cached by rank 0 counts as taken.
        """
        workers = CONTROLLER.workers
        room = workers.room if not self.cp_local and workers is not None and workers.serves(self.cp_config) else None
        if room is None:
            return super().get_free_memory(device)
        if PLANS[class_name(self.model.diffusion_model)].shares_sequence:
            return room * self.cp_config.ranks_per_stage
        return room * min(2, self.cp_config.batch_degree or self.cp_config.ranks_per_stage)  # a rank takes half of two items

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        notes_of(self.model).local = False
        release(self.model.diffusion_model)
        try:
            if self.cp_run.obstacle is not None:
                raise UnsupportedError(self.cp_run.obstacle)
            check_model(self, self.cp_config)
            check_stages(self, self.cp_config)
            if self.model.current_weight_patches_uuid is not None:  # else another branch has them on a device of this process
                super().unpatch_model(None if on_ranks(self.model) else self.offload_device, unpatch_weights=True)
            # Object patches, such as model sampling, act in this process.
            super().unpatch_model(None, unpatch_weights=False)
            super().patch_model(load_weights=False)
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):  # what they change in the model goes to the ranks
                callback(self, device_to, 0, force_patch_weights, True)
            loaded = self._as_loaded()
            added = loaded.load_on_ranks()
        except UnsupportedError as error:
            if self.get_all_callbacks(CallbacksMP.ON_LOAD):  # no sampling will end, which cleans up behind them
                self.cleanup()
            self.refuse(error)
            return self._load_here(device_to, extra_memory, force_patch_weights)
        loaded._patch_what_acts_here()
        intercept(loaded, self.model.diffusion_model)
        return added

    def _patch_what_acts_here(self) -> None:
        """Patch the modules that ComfyUI computes with in this process, outside of the transformer or for a ControlNet, and those
        whose weight shape decides the inputs of the transformer (`BaseModel.concat_cond`)."""
        here = {
            path_of(name)
            for name in self.patches
            if not name.startswith(PREFIX) or name.removeprefix(PREFIX).startswith(READ_HERE) or changes_shape(self, name)
        }
        for name in self.patches:
            if path_of(name) in here:
                self.patch_weight_to_device(name)
        self.model.current_weight_patches_uuid = ON_RANKS

    def load_on_ranks(self) -> int:
        """Load the model onto the ranks, after `free_ui_memory`. Return the additional bytes on this process's device. Raises
        UnsupportedError if no placement fits."""
        before = self.loaded_size()
        free_ui_memory(self.model)
        self.on_ranks(lambda target, cancelled: CONTROLLER.load(self.cp_config, target, executing_node(), cancelled))
        return self.loaded_size() - before

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        if self.cp_local:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        freed = self.loaded_size()
        CONTROLLER.make_room(self.load_device, notes_of(self.model).key)
        return freed

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        if self.cp_local:
            return super().detach(unpatch_all)
        self.eject_model()
        self.model_patches_to(self.offload_device)
        if unpatch_all:
            super().unpatch_model(None, unpatch_weights=False)
            CONTROLLER.make_room(self.load_device, notes_of(self.model).key)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        # ComfyUI patches weights when it writes them, except in modules marked as patched.
        patched = {comfy.utils.get_attr(self.model, path_of(name)) for name in self.backup} if on_ranks(self.model) else set()
        for module in patched:
            module.comfy_patched_weights = True
        try:
            return super().state_dict_for_saving(*args, **kwargs)
        finally:
            for module in patched:
                del module.comfy_patched_weights

    # --- one denoise call ------------------------------------------------------------------------------------------------

    def refuse(self, error: UnsupportedError) -> None:
        """Raise, or switch to ComfyUI's own path on one device with a warning, as on_unsupported says."""
        raise_or_warn(error, self.cp_config, "running on a single device", raised_by="Apply Context Parallel")
        notes_of(self.model).local = True
        CONTROLLER.unload(notes_of(self.model).key)

    def refuse_call(self, error: UnsupportedError) -> None:
        """Refuse after sampling has begun: the weights are loaded into this process now."""
        self.refuse(error)
        release(self.model.diffusion_model)
        self._load_here(self.load_device, 1e32)

    def note_steps(self, steps: int) -> None:
        """Log once per run in patches that warm-up is a large part of few steps."""
        pipeline = self.cp_config.pipeline
        if pipeline is not None and pipeline.patches > 1 and 0 < steps <= FEW_STEPS and self.cp_run.number != self._noted_run:
            self._noted_run = self.cp_run.number
            log.info("CP PipeFusion: %d of %d steps are exact, so patches gain little", min(steps, pipeline.warmup_calls), steps)

    def call_workers(self, call: ModelCall) -> Any:
        comfy.model_management.throw_exception_if_processing_interrupted()
        return self.on_ranks(lambda target, cancelled: CONTROLLER.call(self.cp_config, target, call, executing_node(), cancelled))

    def on_ranks(self, run: Callable[[Target, Callable[[], bool]], Any], bar: WorkBar | None = None) -> Any:
        """Run a function with the ranks' copy of the model. See `with_cancel`."""
        return with_cancel(partial(run, self.claim_target()), bar)

    def _load_here(self, device: torch.device, extra_memory: float, force_patch_weights: bool = False) -> int:
        """Load the model onto a device of this process, as ComfyUI's ModelPatcher does."""
        if give_back(self.model):
            super().unpatch_model(self.offload_device, unpatch_weights=True)
        if is_dynamic(self.model):
            convert(self.model)
        patches, self.patches = self.patches, applied_patches(self)
        try:
            return super().partially_load(device, extra_memory, force_patch_weights)
        finally:
            self.patches = patches

    def patch_hooks(self, hooks: Any) -> None:
        """Have the ranks compute with the weights of a group of hooks, from the next call on."""
        if self.cp_local or not on_ranks(self.model):
            super().patch_hooks(hooks)
        else:
            self.current_hooks = hooks

    def claim_target(self) -> Target:
        """Return the target for the ranks' copy. From now on they keep it for the lifetime of this process's model."""
        notes = notes_of(self.model)
        if notes.run != self.cp_run.number or notes.found is None:
            notes.run, notes.found = self.cp_run.number, self._value(thorough=True)
        value = notes.found
        if notes.key != value.key:
            CONTROLLER.own(value.key, self.model, notes.key)
            notes.key, notes.name, notes.kind = value.key, name_of(self), kind_of(self)
        hooked = with_hooks(self)
        fingerprint = ModelFingerprint(hooked, value.classes, value.names)
        memory, copies = self.cp_run.call_memory, partial(copies_of, self, value)
        beside = () if self.cp_config.in_stages else self.cp_run.controlnets.sizes
        return Target(hooked, value, notes.name, notes.kind, memory, fingerprint, copies, beside)

    def look_again(self) -> None:
        """Look for changes in the model since its run began: the ranks get them with the next call."""
        notes_of(self.model).found = self._value(thorough=False)

    def _value(self, thorough: bool) -> Value:
        try:
            return value_of(self.model).of(self, thorough)
        except MirrorError as error:
            raise UnsupportedError(f"{str(error).rstrip('.')}. {OF_MODEL}") from error

    def _on_device(self) -> bool:
        return CONTROLLER.on_device(notes_of(self.model).key)


def with_hooks(patcher: Any) -> Any:
    """Return a patcher with the weight patches of the hooks that are on in its model's run besides its own.

    ComfyUI rounds a weight between its own patches and those of hooks; the ranks round once. Raises UnsupportedError for hooks on
    weights that this process computes with.
    """
    running = getattr(patcher.model, "current_patcher", None)
    if running is None or (hooks := running.current_hooks) is None or not (patches := running.get_combined_hook_patches(hooks)):
        return patcher
    for name in patches:
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX).startswith(READ_HERE) or changes_shape(patcher, name):
            raise UnsupportedError(f"weight hooks change {name}, which computes in ComfyUI's process. {OF_MODEL}")
    merged = {name: [*patcher.patches.get(name, ()), *entries] for name, entries in patches.items()}
    # Strengths follow keyframes, and reach from the first sigma to the last.
    state = " ".join(f"{id(hook.hook_ref)} {hook.strength}" for hook in hooks.hooks)
    hooked = object.__new__(type(patcher))
    hooked.__dict__ = {**vars(patcher), "patches": {**patcher.patches, **merged}, "patches_uuid": f"{patcher.patches_uuid} {state}"}
    return hooked


def path_of(weight: str) -> str:
    """Return the path of the module that has a weight."""
    return weight.rpartition(".")[0]


@cache
def _over(cls: type[Any], plain: type[Any]) -> type[Any]:
    """Return our class of patchers over the class of the model's patcher, which loads it on one device."""
    return cls if plain is comfy.model_patcher.ModelPatcher else type(cls.__name__, (cls, plain), {})


def plain_class(cls: type[Any]) -> type[Any]:
    """Return a model's class of patchers without context parallelism."""
    return next(base for base in cls.__mro__ if not issubclass(base, ContextParallelPatcher))


def executing_node() -> Node | None:
    context = get_executing_context()
    if context is None:
        return None
    graph = get_progress_state().dynprompt
    kind = graph.get_node(context.node_id)["class_type"] if graph.has_node(context.node_id) else None
    return Node(context.prompt_id, context.node_id, kind)


def raise_or_warn(error: UnsupportedError, config: RuntimeConfig, instead: str, raised_by: str = "") -> None:
    """Raise the error of a refused run, after `raised_by`, the node, and record it in the status; or log a warning with the action
    `instead`, as on_unsupported says."""
    if config.on_unsupported == "error":
        error = UnsupportedError(f"{raised_by}: {error}") if raised_by else error
        CONTROLLER.journal.fail(error, executing_node())
        raise error from None
    log.warning("%s: %s", instead, error)
