"""What keeps a model, as the graph built it, from running on the workers: one sentence each, with a remedy.

The workers hold the model, its weight patches and stock forwards. Anything else that another node attached to the model exists only
in the UI process, and must be refused: a sharded forward would silently run without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import comfy.controlnet
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from ...compat import has_hooks
from ...errors import MirrorError, PlanError, UnsupportedError
from ...families import PLANS, class_name, plan_for
from ..attention.ui import attention_of
from ..compiled.ui import compile_of, is_known
from ..model.ui_notes import notes_of
from ..model.ui_recipes import recipe_of
from ..patches.ui_nodes import PatchSet
from ..patches.wire_weights import encode_weight_patches

_REMEDY = "Remove that node, or set on_unsupported of CP Config to 'single device'."
FORWARDS = ("forward", "_forward", "forward_orig")
_KNOWN_PATCHERS = ("ModelPatcher", "ModelPatcherDynamic", "ContextParallelPatcher")
_READING_WEIGHTS = (comfy.controlnet.ControlLora, comfy.controlnet.QwenFunControlNet)
_BASE_PATCHES_REFUSED = ("diffusion_model", "manual_cast_dtype")


def model_obstacle(patcher: Any, device_type: str) -> str | None:
    """Return why this ModelPatcher cannot run on ranks of a device type, or None. Known before sampling starts."""
    model = patcher.model.diffusion_model
    if hasattr(model, "_orig_mod"):
        return f"the model was compiled with torch.compile, which the workers do not repeat. {_REMEDY}"
    try:
        plan_for(model)
        recipe_of(patcher)
        encode_weight_patches(patcher.patches)
    except (UnsupportedError, PlanError, MirrorError) as error:
        return str(error)
    return (
        options_obstacle(patcher.model_options.get("transformer_options", {}), model, device_type)
        or patcher_obstacle(patcher)
        or next(replaced_code(model), None)
    )


def patcher_obstacle(patcher: Any) -> str | None:
    """Return what is attached to the ModelPatcher that the workers do not have, or None. Cheap."""
    return next(_attached(patcher), None)


def options_obstacle(options: dict[str, Any], model: nn.Module, device_type: str) -> str | None:
    """Return what in `transformer_options` cannot run on the workers, or None."""
    try:
        patches_and_attention(options, model, device_type)
    except UnsupportedError as error:
        return str(error)
    return None


def patches_and_attention(
    options: Mapping[str, Any], model: nn.Module, device_type: str, latent: Tensor | None = None
) -> tuple[PatchSet, str | None]:
    """Take what the workers need out of `transformer_options`: see `PatchSet.of` and `attention_of`.

    Raises:
        UnsupportedError: something in them cannot run on the workers; with a remedy.
    """
    try:
        if options.get("ar_state") is not None:
            raise UnsupportedError("autoregressive sampling keeps state inside the transformer.")
        return PatchSet.of(options, model, latent), attention_of(options, device_type)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error} {_REMEDY}") from error


def control_obstacle(model: nn.Module, control: dict[str, Any] | None) -> str | None:
    """Return why ControlNet residuals cannot be added on the workers, or None."""
    given = {kind for kind, residuals in (control or {}).items() if any(residual is not None for residual in residuals)}
    if not given:
        return None
    plan = PLANS[class_name(model)]
    if not plan.shares_sequence or given <= plan.control.keys():
        return None
    takes = f"adds those of kind {' and '.join(plan.control)} only" if plan.control else "takes none"
    return (
        f"a ControlNet gave residuals of kind {' and '.join(sorted(given))}, and {plan.family} {takes}. "
        "Remove the ControlNet, or load one that was made for this model."
    )


def forward_obstacle(model: nn.Module) -> str | None:
    """Return which forward of the transformer is not its own, or None. Cheap: some nodes replace it for the time of a call."""
    if any(_is_foreign(model, method) for method in FORWARDS):
        return f"a node replaced the forward of {type(model).__name__}. {_REMEDY}"
    return None


def conditions_obstacle(conds: Mapping[str, Any]) -> str | None:
    """Return what in the conditions of a sampling run needs the model's weights in this process, or None."""
    for cond in (cond for part in conds.values() for cond in part or ()):
        control = cond.get("control")
        while control is not None:
            if isinstance(control, _READING_WEIGHTS):
                return f"a ControlNet ({type(control).__name__}) computes with the model's own weights. {_REMEDY}"
            control = control.previous_controlnet
    return None


def _attached(patcher: Any) -> Iterator[str]:
    if type(patcher).__name__ not in _KNOWN_PATCHERS and notes_of(patcher.model).call is None:
        yield f"the model is a {type(patcher).__name__} of another node pack, which the workers cannot rebuild. {_REMEDY}"
    if patcher.get_all_callbacks(CallbacksMP.ON_LOAD):
        yield f"a node runs code whenever the model is loaded, which the workers do not have. {_REMEDY}"
    if patcher.get_additional_models_with_key("multigpu"):
        yield f"MultiGPU CFG Split made clones of the model; it and context parallelism exclude each other. {_REMEDY}"
    if any(patcher.injections.values()):
        yield f"a node injected code into the model ({', '.join(patcher.injections)}), as bypass LoRA does. {_REMEDY}"
    if patcher.hook_patches or patcher.current_hooks is not None:
        yield f"weight hooks change the model's weights while sampling. {_REMEDY}"
    if patcher.weight_wrapper_patches:
        yield f"a node wrapped weights ({next(iter(patcher.weight_wrapper_patches))}). {_REMEDY}"
    for name in patcher.object_patches:
        if name.split(".")[0] in _BASE_PATCHES_REFUSED:
            yield f"a node replaced {name} of the model, which the workers do not repeat. {_REMEDY}"
    for kind, wrappers in patcher.wrappers.items():
        compiling = [key for key, functions in wrappers.items() if functions and str(key).startswith("torch.compile")]
        if not all(is_known(patcher, kind, key) for key in compiling):
            yield f"a node compiles the model in a way of its own, which the workers do not repeat. {_REMEDY}"
    try:
        compile_of(patcher)
    except UnsupportedError as error:
        yield f"{error} {_REMEDY}"


def replaced_code(model: nn.Module) -> Iterator[str]:
    """Yield what other nodes put into modules of a model and the workers do not have."""
    for name, module in model.named_modules():
        if any(_is_foreign(module, method) for method in FORWARDS):
            yield f"a node replaced the forward of {name or type(model).__name__}. {_REMEDY}"
        if has_hooks(module):
            yield f"a node put hooks on {name or type(model).__name__}. {_REMEDY}"


def _is_foreign(module: nn.Module, method: str) -> bool:
    """Return whether an instance's method is not its class's. ComfyUI leaves the stock method there when it undoes a patch."""
    own = vars(module).get(method)
    if own is None or getattr(own, "sends_to_workers", False):  # ours, see ui_interception.py
        return False
    return getattr(own, "__func__", None) is not getattr(type(module), method, None)
