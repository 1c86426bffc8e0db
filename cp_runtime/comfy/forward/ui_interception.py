"""Send the transformer's innermost forward, in the UI process, to the workers.

It is the innermost one, so that wrappers which skip or repeat it (step caches, seam smoothing) keep their meaning. It is installed
on the instance while a patcher of ours is the loaded one, so that it does not depend on what samplers and guiders hand on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol
from weakref import ref

from comfy.cli_args import args as settings
from torch import Tensor, nn

from ...comfyui import unrecorded
from ...controller.calls import ModelCall
from ...errors import UnsupportedError
from ...families import PLANS, class_name
from ...nested import tensors
from ...pool.config import RuntimeConfig
from ..attention.wire import OPTION as ATTENTION
from ..model.wire_modules import encode_module
from ..patches.ui_nodes import PatchSet
from .ui_obstacles import control_obstacle, forward_obstacle, options_obstacle, patcher_obstacle, patches_and_attention
from .ui_texts import METHOD, LocalTexts
from .wire_options import SENDABLE, plain_options

IN_PLACE = frozenset({"control"})  # residuals: each rank copies only its part


class Owner(Protocol):
    """What an interception needs of its patcher."""

    model: Any
    cp_config: RuntimeConfig

    def call_workers(self, call: ModelCall) -> Any: ...
    def refuse_call(self, obstacle: str) -> None: ...


class WorkerForward:
    """Replacement for a method of one transformer instance.

    Args:
        owner: the patcher; held weakly, because it holds the model.
        model: the transformer.
    """

    sends_to_workers = True

    def __init__(self, owner: Owner, model: nn.Module) -> None:
        self.owner, self.model = ref(owner), model
        self.method = innermost_method(model)
        self.stock: Callable[..., Any] = getattr(type(model), self.method).__get__(model)
        self.signature = inspect.signature(self.stock)
        self.leading = tuple(self.signature.parameters)[:2]  # the latent and the timestep
        plan = PLANS.get(class_name(model))
        self.rebuilt = [path.split(".") for path in plan.rebuilt] if plan else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner()
        if owner is None:
            return self.stock(*args, **kwargs)
        arguments = self._named(args, kwargs)
        options = arguments.get("transformer_options") or {}
        latent = next(tensors(arguments[self.leading[0]]))  # nested: video, audio
        try:
            patches, attention = self._accepted(owner, arguments, options, latent)
        except UnsupportedError as error:
            obstacle = str(error)
        else:
            plain = plain_options(options)
            if attention is not None:
                plain[ATTENTION] = attention
            arguments["transformer_options"] = {**plain, **patches.encoded}
            return owner.call_workers(
                ModelCall(
                    method=self.method,
                    arguments=arguments,
                    leading=self.leading,
                    device=latent.device,
                    in_place=IN_PLACE,
                    mixes_batch=patches.mixes_batch,
                    networks=patches.networks,
                    encode_network=encode_module,
                )
            )
        owner.refuse_call(obstacle)
        return self.stock(*args, **kwargs)

    def _accepted(
        self, owner: Owner, arguments: dict[str, Any], options: dict[str, Any], latent: Tensor
    ) -> tuple[PatchSet, str | None]:
        """Return a call's patches and chosen attention. Raise UnsupportedError where the workers cannot run it."""
        control = arguments.get("control")
        obstacle = patcher_obstacle(owner) or control_obstacle(self.model, control) or forward_obstacle(self.model)
        if obstacle is not None:
            raise UnsupportedError(obstacle)
        return patches_and_attention(options, self.model, owner.cp_config.device_type, latent)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, extra keywords included."""
        bound = dict(self.signature.bind(*args, **kwargs).arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
            elif bound.get(name) is parameter.default and not isinstance(parameter.default, SENDABLE):
                del bound[name]  # an object; the workers have the same default
        for name, key in self.rebuilt:
            if isinstance(bound.get(name), dict):
                bound[name] = {k: v for k, v in bound[name].items() if k != key}
        return bound


def innermost_method(model: nn.Module) -> str:
    """Return `_forward` if the class calls it through ComfyUI's wrappers, else `forward`."""
    return "_forward" if hasattr(type(model), "_forward") else "forward"


def is_intercepted(model: nn.Module) -> bool:
    """Return whether a model's calls go to the workers."""
    return isinstance(vars(model).get(innermost_method(model)), WorkerForward)


def check_forward(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse a forward that a node has put in place of the transformer's: it may never reach the intercepted one. And have ComfyUI
    record no call of the intercepted one, of which it may call more than the innermost part that is replaced.

    This ComfyUI wrapper is around every call. Nodes that replace a forward for a single call, as step caches do, do so outside it.
    """
    model = executor.class_obj.diffusion_model  # type: ignore[attr-defined]
    installed = vars(model).get(innermost_method(model))
    owner = installed.owner() if isinstance(installed, WorkerForward) else None
    obstacle = forward_obstacle(model)
    if owner is not None and obstacle is not None:
        owner.refuse_call(obstacle)
    with unrecorded(settings) if owner is not None else nullcontext():
        return executor(*args, **kwargs)


class GuardedForward:
    """Replacement for a `forward` that may bypass the innermost method: refuses what would then run in this process.

    Args:
        owner, model: as for WorkerForward.
    """

    sends_to_workers = True

    def __init__(self, owner: Owner, model: nn.Module) -> None:
        self.owner, self.model = ref(owner), model
        self.stock: Callable[..., Any] = type(model).forward.__get__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner()
        if owner is not None:
            obstacle = options_obstacle(kwargs.get("transformer_options") or {}, self.model, owner.cp_config.device_type)
            if obstacle is not None:
                owner.refuse_call(obstacle)
        return self.stock(*args, **kwargs)


def intercept(owner: Owner, model: nn.Module) -> None:
    """Send the model's calls to the workers."""
    setattr(model, innermost_method(model), WorkerForward(owner, model))
    own = vars(type(model))
    if innermost_method(model) == "_forward" and "forward" in own and "_forward" not in own:  # may bypass `_forward`
        model.forward = GuardedForward(owner, model)
    if hasattr(type(model), METHOD):
        setattr(model, METHOD, LocalTexts(owner, model))


def release(owner: Owner, model: nn.Module) -> None:
    """Undo `intercept`, unless another owner has taken over."""
    for method in {innermost_method(model), "forward", METHOD}:
        installed = vars(model).get(method)
        if isinstance(installed, (WorkerForward, GuardedForward, LocalTexts)) and installed.owner() in (owner, None):
            delattr(model, method)
