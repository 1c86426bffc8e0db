"""ControlNets on the ranks. ComfyUI's process prepares what a ControlNet gets, hint and embeddings; its network runs on the ranks,
as a part of the denoise call, and its residuals stay there.

Whoever else looks into the residuals gets ComfyUI's: they are computed here then.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import comfy.controlnet
import comfy.model_management
import torch
from torch import Tensor, nn

from ...engine.weights.blocks import Sizes, sizes_of
from ...families import class_name
from ...families.controlnets import CONTROLNETS
from ..shared.reached import is_of_pack
from .networks import identified
from .watching import controls_of

SENT = comfy.controlnet.ControlNet, comfy.controlnet.ControlNetSD35
"""Not those that compute with the weights of the model, nor those of node packs."""
METHODS = ("ControlNet.get_control", "ControlBase.control_merge")
"""Not replaced by a node pack."""
ALIKE = ("strength", "strength_type", "global_average_pooling")
"""What `ControlBase.control_merge` reads of a ControlNet."""


@dataclass(frozen=True)
class Deferred:
    """A ControlNet's part of one call. `arguments`: of its network, by name."""

    control: Any
    network: nn.Module
    arguments: Mapping[str, Any]

    def encoded(self, run: int) -> dict[str, Any]:
        """Return it as plain data and tensors, for the ranks, in a sampling run."""
        merge = {name: getattr(self.control, name) for name in ALIKE}
        return {
            "key": identified(self.network, run).key,
            "arguments": dict(self.arguments),
            **merge,
            "strength_type": merge["strength_type"].name,
        }

    def computed(self, before: Any) -> Any:
        """Compute it here, added to residuals `before`."""
        comfy.model_management.load_models_gpu([self.control.control_model_wrapped])
        with torch.no_grad():
            return comfy.controlnet.ControlBase.control_merge(self.control, self.network(**self.arguments), before, None)


class DeferredControl(dict[str, Any]):
    """Residuals of a chain of ControlNets: computed here when code looks into them, unless the ranks do that. `links`: first to
    last; empty once they are computed."""

    links: tuple[Deferred, ...] = ()  # of a copy

    def __init__(self, links: tuple[Deferred, ...]) -> None:
        super().__init__()
        self.links = links

    def fill(self) -> None:
        links, self.links = self.links, ()
        out = None
        for each in links:
            out = each.computed(out)
        dict.update(self, out or {})


def form_of(control: Any) -> Any:
    """Return what tells kinds of calls with residuals apart, without computing any."""
    return tuple(each.arguments for each in control.links) if isinstance(control, DeferredControl) and control.links else control


def _filling(name: str) -> Any:
    method = getattr(dict, name)

    def filled(self: DeferredControl, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    return filled


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__", "__ior__",
    "__repr__", "__reversed__", "__reduce_ex__", "get", "items", "values", "keys", "pop", "popitem", "copy", "setdefault",
    "update", "clear",
):  # fmt: skip
    setattr(DeferredControl, _name, _filling(_name))


class Recorder:
    """Stands for the network of a ControlNet while ComfyUI prepares a call of it: notes the arguments instead of computing."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, **arguments: Any) -> Any:
        # Others may write to them in place before the ranks compute.
        return Recorded({name: each.clone() if isinstance(each, Tensor) else each for name, each in arguments.items()})


class Recorded(dict[str, Any]):
    """The arguments of a network's call."""


class ControlNets(NamedTuple):
    """The ControlNets of a run's conditions.

    Args:
        on_ranks: those whose networks ranks can run.
        sizes: of these networks.
        kinds_here: classes of the others.
    """

    on_ranks: tuple[Any, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    kinds_here: tuple[str, ...] = ()

    @classmethod
    def of(cls, conds: Mapping[str, Any]) -> ControlNets:
        found = list(controls_of(conds))
        here = {id(each): kind for each in found if (kind := _kind_here(each)) is not None}
        taken = tuple(each for each in found if id(each) not in here)
        networks = {id(each.control_model): each.control_model for each in taken}
        return cls(taken, tuple(map(sizes_of, networks.values())), tuple(dict.fromkeys(here.values())))

    def deferred(self) -> ExitStack:
        """Have them leave their networks to the ranks, until the stack is closed. Copies of them do not."""
        undo = ExitStack()
        for control in self.on_ranks:
            for name, instead in (("get_control", _get_control), ("get_models", _models)):
                setattr(control, name, instead.__get__(control))
                undo.callback(delattr, control, name)
        return undo

    def why_here(self, control: Any, in_stages: bool) -> tuple[str, str] | None:
        """Return why ComfyUI's process has computed the residuals of a call: a key of the report's words, and what they name.
        None = it has computed none."""
        if control is None:
            return None
        if in_stages:
            return "stages", ""
        if self.kinds_here and not isinstance(control, DeferredControl):
            return "kind", ", ".join(self.kinds_here)
        return "other", ""


def _kind_here(control: Any) -> str | None:
    """Return the kind of a ControlNet that ranks cannot run; None = they can."""
    cls: Any = type(control)
    if cls not in SENT:
        return str(cls.__name__)
    network, patcher = control.control_model, control.control_model_wrapped
    kind = type(network).__name__
    if class_name(network) not in CONTROLNETS:
        return kind
    stock = all(getattr(cls, name).__qualname__ in METHODS for name in ("get_control", "control_merge"))
    if not stock or any(name in vars(control) for name in ("get_control", "control_merge", "get_models")):
        return f"{kind} with methods of another node"
    if patcher.patches or patcher.object_patches or any(patcher.injections.values()):
        return f"{kind} with patches"
    if any(is_of_pack(type(module).__module__) for module in network.modules()):
        return f"{kind} with modules of another node"
    return None


def _get_control(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare a call as ComfyUI does, up to the network."""
    network = self.control_model
    self.control_model, self.control_merge = Recorder(network), partial(_merge, self, network)
    try:
        return type(self).get_control(self, *args, **kwargs)
    finally:
        self.control_model = network
        del self.control_merge


def _merge(self: Any, network: nn.Module, control: Any, before: Any, output_dtype: torch.dtype | None) -> Any:
    own = Deferred(self, network, control)
    links = before.links if isinstance(before, DeferredControl) else ()
    if output_dtype is not None or (before is not None and not links):
        return own.computed(before)
    return DeferredControl((*links, own))


def _models(self: Any) -> list[Any]:
    """Return the models that ComfyUI loads here: those of other ControlNets of the chain."""
    models: list[Any] = [] if self.previous_controlnet is None else self.previous_controlnet.get_models()
    return models
