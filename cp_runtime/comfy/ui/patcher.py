"""The MODEL that Apply Context Parallel returns: ComfyUI's memory manager and samplers see an ordinary ModelPatcher, its weights
are on the workers, and the denoise call goes there.

Of the UI process's `BaseModel`, everything but the transformer's forward is used as it is: model sampling, conditioning,
latent format, object patches on them.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_execution.utils import get_executing_context
from torch import nn

from ...errors import UnsupportedError, bad_value
from ...pool.config import DeviceInventory, RuntimeConfig
from ...pool.worker_pool import CallCancelled
from .controller import CONTROLLER, Node
from .file_pages import share_file_pages
from .interception import intercept, release
from .obstacles import conditions_obstacle, model_obstacle
from .recipes import recipe_of
from .target import Target
from .timing import RunTimer, stop_timing, time_calls

log = logging.getLogger("context_parallel")

WRAPPER = "context_parallel"


def device_inventory() -> DeviceInventory:
    """The devices that ranks may use: those of the type ComfyUI itself runs on."""
    kind = comfy.model_management.get_torch_device().type
    try:
        count = 0 if kind == "cpu" else torch.get_device_module(kind).device_count()
    except RuntimeError:  # a device type that torch has no module for
        count = 1
    return DeviceInventory(type=kind, count=count)


class ContextParallelPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose weights live on the worker pool.

    Attributes:
        cp_config: pool and sharding.
        cp_local: the model runs in the UI process on one device, because on_unsupported says so.
        cp_conditions_obstacle: what in the conditions of the sampling run keeps it from the workers.
    """

    cp_config: RuntimeConfig
    cp_local: bool = False
    cp_conditions_obstacle: str | None = None

    def clone(self, *args: Any, **kwargs: Any) -> ContextParallelPatcher:
        clone = super().clone(*args, **kwargs)
        if isinstance(clone, ContextParallelPatcher):
            clone.cp_config = self.cp_config
        return clone

    # --- what the memory manager asks and tells -------------------------------------------------------------------------

    def loaded_size(self) -> int:
        if self.cp_local:
            return super().loaded_size()
        return self.model_size() if self._resident() else 0

    def current_loaded_device(self) -> torch.device:
        if self.cp_local:
            return super().current_loaded_device()
        return self.load_device if self._resident() else self.offload_device

    def lowvram_patch_counter(self) -> int:
        return super().lowvram_patch_counter() if self.cp_local else 0

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        self.cp_local = False
        release(self, self.model.diffusion_model)
        obstacle = self.cp_conditions_obstacle or model_obstacle(self)
        if obstacle is not None:
            self.refuse(obstacle)
            return super().partially_load(device_to, extra_memory, force_patch_weights)
        if self.model.current_weight_patches_uuid is not None:  # another branch had them on a device of this process
            super().unpatch_model(self.offload_device, unpatch_weights=True)
        # Object patches (model sampling and the like) act in this process.
        super().unpatch_model(None, unpatch_weights=False)
        super().patch_model(load_weights=False)
        before = self.loaded_size()
        target = self._load_workers()
        intercept(self, self.model.diffusion_model)
        if not getattr(self.model, "_cp_shares_file", False):
            try:
                released = share_file_pages(self, target.recipe)
            except UnsupportedError as error:
                release(self, self.model.diffusion_model)
                self.refuse(str(error))
                return super().partially_load(device_to, extra_memory, force_patch_weights)
            self.model._cp_shares_file = True
            if released:
                log.info("this process shares %.0f MB of weights with the workers through the file", released / 1e6)
        return self.loaded_size() - before

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        if self.cp_local:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        freed = self.loaded_size()
        CONTROLLER.unload(recipe_of(self).key)
        return freed

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        release(self, self.model.diffusion_model)
        if self.cp_local:
            return super().detach(unpatch_all)
        self.eject_model()
        self.model_patches_to(self.offload_device)
        if unpatch_all:
            super().unpatch_model(None, unpatch_weights=False)
            if self._resident():
                CONTROLLER.unload(recipe_of(self).key)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    # --- one denoise call ------------------------------------------------------------------------------------------------

    def refuse(self, obstacle: str) -> None:
        """Raise, or switch to the stock path on one device with a warning, as on_unsupported says."""
        if self.cp_config.on_unsupported == "error":
            raise UnsupportedError(f"Apply Context Parallel: {obstacle}")
        log.warning("running on a single device: %s", obstacle)
        self.cp_local = True

    def refuse_call(self, obstacle: str) -> None:
        """`refuse`, once sampling has begun: the weights come to this process now."""
        self.refuse(obstacle)
        release(self, self.model.diffusion_model)
        super().partially_load(self.load_device, 1e32)

    def call_workers(
        self,
        method: str,
        arguments: dict[str, Any],
        leading: Sequence[str],
        device: torch.device,
        networks: Mapping[str, nn.Module],
    ) -> Any:
        """Run `method` of the transformer on all ranks; the result goes to `device`. `networks`: what patches refer to, by key."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        # Another model of the same file may have called in between (two guiders, other LoRA), or the pool was lost.
        target = self._load_workers()
        interrupted = comfy.model_management.processing_interrupted
        with_cancel(lambda: CONTROLLER.attach(self.cp_config, networks, interrupted))
        return with_cancel(lambda: CONTROLLER.call(self.cp_config, target.key, method, arguments, leading, device, interrupted))

    def _load_workers(self) -> Target:
        context = get_executing_context()
        CONTROLLER.node = Node(context.prompt_id, context.node_id) if context is not None else None
        target = Target.of(self, recipe_of(self))
        _own(self.model, target.key)
        with_cancel(lambda: CONTROLLER.load(self.cp_config, target, comfy.model_management.processing_interrupted))
        return target

    def _resident(self) -> bool:
        return self.cached_patcher_init is not None and CONTROLLER.is_resident(recipe_of(self).key)


def with_cancel(run: Callable[[], Any]) -> Any:
    """Turn a cancelled command of the pool into ComfyUI's interrupt."""
    try:
        return run()
    except CallCancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise comfy.model_management.InterruptProcessingException from None


def _own(model: Any, key: str) -> None:
    if getattr(model, "_cp_key", None) != key:
        model._cp_key = key
        CONTROLLER.own(key)
        weakref.finalize(model, CONTROLLER.disown, key).atexit = False


def apply_to_model(model: Any, config: RuntimeConfig) -> Any:
    """Return a MODEL that computes on `config`'s ranks; the given one where there is nothing to do.

    Raises:
        UnsupportedError: the model cannot run sharded and on_unsupported is "error".
    """
    if not isinstance(config, RuntimeConfig):  # ComfyUI takes any JSON in the place of a link
        raise bad_value("cp_config", config, "the output of a CP Config node", "Connect one.")
    if sys.platform != "linux":
        log.warning("context parallelism needs Linux (or WSL2); the model passes through on one device")
        return model
    if config.world_size == 1:
        log.info("context parallelism over one device: the model passes through")
        return without_context_parallel(model)
    obstacle = model_obstacle(model)
    if obstacle is not None:
        if config.on_unsupported == "error":
            raise UnsupportedError(f"Apply Context Parallel: {obstacle}")
        log.warning("the model passes through on a single device: %s", obstacle)
        return model
    # A plain patcher over the same BaseModel, whatever kind of memory management the given one does.
    patcher = model.clone(disable_dynamic=True, model_override=model.get_clone_model_override())
    patcher.__class__ = ContextParallelPatcher
    patcher.cp_config = config
    patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER, prepare_sampling)
    time_calls(patcher, begin_run)
    return patcher


def begin_run(timer: RunTimer) -> None:
    """Show a sampling run in the status."""
    CONTROLLER.run = timer


def prepare_sampling(executor: Callable[..., Any], model: Any, noise_shape: Any, conds: dict[str, Any], **kwargs: Any) -> Any:
    """Look at the conditions before the model is loaded, when it can still be loaded in this process instead."""
    if isinstance(model, ContextParallelPatcher):
        model.cp_conditions_obstacle = conditions_obstacle(conds)
    return executor(model, noise_shape, conds, **kwargs)


def without_context_parallel(model: Any) -> Any:
    """Return the model as it was before `apply_to_model`."""
    if not isinstance(model, ContextParallelPatcher):
        return model
    plain = model.clone()
    plain.__class__ = comfy.model_patcher.ModelPatcher
    plain.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER)
    stop_timing(plain)
    return plain
