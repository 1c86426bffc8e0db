"""Attention functions that the model file chose for single layers.

ComfyUI takes the layer's choice out of the arguments before it calls an override, so an override cannot see it. A hook on the layer
gives it other options: with the override for its function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...errors import MirrorError
from ..shared.attention import function_name, layer_functions
from ..shared.forward import LAYERS

OPTIONS = "transformer_options"
_hooked: WeakKeyDictionary[nn.Module, dict[str, Callable[..., Tensor]]] = WeakKeyDictionary()


def functions_of(model: nn.Module, names: Collection[str]) -> Mapping[str, Callable[..., Tensor]]:
    """Return the functions of a model's layers by name, and hook the layers. Raises MirrorError unless they are those of ComfyUI's
    process, `names`: each device decides for itself what it can run."""
    if model not in _hooked:
        layers = [(layer, function_name(function), function) for _, layer, function in layer_functions(model)]
        for layer, name, _ in layers:
            layer.register_forward_pre_hook(_Choice(layer, name), with_kwargs=True)
        _hooked[model] = {name: function for _, name, function in layers}
    functions = _hooked[model]
    if functions.keys() != set(names):
        raise MirrorError(
            f"the model file chooses attention functions for layers, of which this rank's device runs {_listed(functions)}, and "
            f"ComfyUI's device {_listed(names)}. Choose devices of one kind in CP Config, or load a file without that choice."
        )
    return functions


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


class _Choice:
    """Hook that gives a layer the override for a function, by its name, where the options of the call have one (`LAYERS`)."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.name = name
        parameters = list(inspect.signature(layer.forward).parameters)
        self.place = parameters.index(OPTIONS) if OPTIONS in parameters else None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self.place
        if place is not None and place < len(args):
            return (*args[:place], self._chosen(args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, OPTIONS: self._chosen(kwargs[OPTIONS])} if OPTIONS in kwargs else kwargs

    def _chosen(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        override = options.get(LAYERS, {}).get(self.name)
        return options if override is None else {**options, "optimized_attention_override": override}
