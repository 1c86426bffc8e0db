"""Apply context parallelism to a MODEL, and undo it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import comfy.model_patcher
from comfy.patcher_extension import WrappersMP
from comfy.sampler_helpers import estimate_memory
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...errors import UnsupportedError, bad_value
from ...pool.config import RuntimeConfig
from ..memory.ui_dynamic_vram import patcher_over
from ..ranks.ui import CONTROLLER
from ..ranks.ui_devices import default_config, nothing_to_share
from .ui_interception import check_forward
from .ui_obstacles import conditions_obstacle, model_obstacle
from .ui_patcher import ContextParallelPatcher, executing_node, noted, plain_class
from .ui_timing import stop_timing, time_calls

log = logging.getLogger("context_parallel")

WRAPPER = "context_parallel"


def check_model(model: Any) -> None:
    """Raise ConfigError for anything but a MODEL: ComfyUI takes any JSON in the place of a link."""
    if not isinstance(model, comfy.model_patcher.ModelPatcher):
        raise bad_value("model", model, "a MODEL", "Connect the output of Load Diffusion Model or Load Checkpoint.")


def apply_to_model(model: Any, config: RuntimeConfig | None = None) -> Any:
    """Return a MODEL that computes on `config`'s ranks, or on all devices without one; unchanged if there is nothing to do.

    Raises:
        ConfigError: an argument is of another type.
        UnsupportedError: the model cannot run sharded and on_unsupported is "error".
    """
    check_model(model)
    config = default_config() if config is None else config
    if not isinstance(config, RuntimeConfig):  # ComfyUI accepts any JSON in place of a link
        raise bad_value("cp_config", config, "the output of a CP Config node, or nothing", "Connect one, or none for all devices.")
    alone = nothing_to_share()
    if alone is not None and (config.world_size == 1 or sys.platform != "linux"):
        log.warning("the model passes through: %s", alone.words)
        CONTROLLER.journal.pass_through(executing_node())
    if sys.platform != "linux":
        return model
    if config.world_size == 1:
        log.info("context parallelism over one device: the model passes through")
        return timed(without_context_parallel(model).clone())
    obstacle = model_obstacle(model, config.device_type)
    if obstacle is not None:
        if config.on_unsupported == "error":
            raise noted(UnsupportedError(f"Apply Context Parallel: {obstacle}"))
        log.warning("the model passes through on a single device: %s", obstacle)
        return timed(without_context_parallel(model).clone())
    patcher = ContextParallelPatcher.over(model, config)
    for wrapper in patcher.wrappers.get(WrappersMP.APPLY_MODEL, {}).pop(COMPILE_KEY, []):
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, wrapper)
    patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER, prepare_sampling)
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, WRAPPER)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, WRAPPER, check_forward)
    return timed(patcher)


def timed(patcher: Any) -> Any:
    """Have a patcher's runs measured, also those on one device, for comparison. Return the patcher."""
    parallel = isinstance(patcher, ContextParallelPatcher)
    time_calls(patcher, patcher.cp_config.devices[0] if parallel else str(patcher.load_device))
    return patcher


def prepare_sampling(executor: Callable[..., Any], model: Any, noise_shape: Any, conds: dict[str, Any], **kwargs: Any) -> Any:
    """Look at the conditions before the model is loaded, when it can still be loaded in this process instead."""
    if isinstance(model, ContextParallelPatcher):
        model.cp_conditions_obstacle = conditions_obstacle(conds)
        model.cp_call_memory, model.cp_memory_scale = call_memory(model, noise_shape, conds)
    return executor(model, noise_shape, conds, **kwargs)


def call_memory(model: Any, noise_shape: Any, conds: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes that ComfyUI expects a call to take, and their ratio to what it expects for the latent alone."""
    alone = model.memory_required(list(noise_shape))
    _, together = estimate_memory(model, noise_shape, conds)
    return together, max(1.0, together / alone) if alone > 0 else 1.0


def without_context_parallel(model: Any) -> Any:
    """Return the model as it was before `apply_to_model`."""
    if not isinstance(model, ContextParallelPatcher):
        return model
    plain = model.clone()
    plain.__class__ = plain_class(type(plain))
    for kind in (WrappersMP.PREPARE_SAMPLING, WrappersMP.APPLY_MODEL):
        plain.remove_wrappers_with_key(kind, WRAPPER)
    stop_timing(plain)
    return patcher_over(plain)
