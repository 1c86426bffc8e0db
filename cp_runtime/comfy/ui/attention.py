"""The attention of a call, where it is not ComfyUI's default: chosen by a node for the model, or by the model file for layers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from comfy.ldm.modules import attention as functions
from torch import nn

from ...errors import UnsupportedError
from ...families import PLANS, class_name
from ...pool.config import RuntimeConfig
from ...pool.settings import label_of
from ..shared.attention import (
    FLASH_OF_PACK,
    ON_CUDA,
    OVERRIDES,
    SAGE_MODES,
    SAGE_OF_PACK,
    SPARSE_BLOCK,
    SPARSE_OVERRIDE,
    function_name,
    layer_functions,
    missing_for,
)  # fmt: skip
from ..shared.forward import ATTENTION, LAYERS, SPARSE
from ..shared.patches import name_of
from .pack_nodes import made_by, name_in_pack

OVERRIDE = "optimized_attention_override"
_of_layers: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class ChosenAttention:
    """The attention of a call.

    Args:
        name: of the function that a node chose (see `shared.attention`); "" = ComfyUI's.
        sparse: settings of Model Sparse Attention; empty = all tokens are attended to.
        layers: names of the functions that the model file chose for layers.
    """

    name: str = ""
    sparse: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()

    @property
    def all_tokens(self) -> bool:
        """Whether a function needs all tokens of a head at once."""
        return bool(self.sparse or self.layers)

    @property
    def encoded(self) -> dict[str, Any]:
        """Its form in `transformer_options`."""
        given = {ATTENTION: self.name, SPARSE: dict(self.sparse), LAYERS: self.layers}
        return {key: value for key, value in given.items() if value}


def attention_of(
    options: Mapping[str, Any], model: nn.Module, config: RuntimeConfig, compiles: bool = False, again: bool = False
) -> tuple[ChosenAttention, Mapping[str, Any]]:
    """Return the attention of a call, and the options without patches that belong to it. Raises UnsupportedError if the ranks of
    the config do not have it, or the override is unknown.

    Args:
        compiles: the ranks compile the blocks.
        again: look at the model's layers, which is slow, although they were looked at before.
    """
    override = options.get(OVERRIDE)
    if override is None:
        if again or model not in _of_layers:
            _of_layers[model] = _layers(model)
        chosen, what = ChosenAttention(layers=_of_layers[model]), "the model file"
    else:
        what, settings = made_by(override), {}
        if name_of(override) == SPARSE_OVERRIDE:
            settings, override = _sparse(override), _held(override).get("previous")
            options = _without_blocks(options)
        chosen = ChosenAttention(name="" if override is None else checked_name(override, config.device_type), sparse=settings)
    if chosen.all_tokens:
        _check_all_tokens(chosen, what, config, compiles)
    return chosen, options


def _check_all_tokens(chosen: ChosenAttention, what: str, config: RuntimeConfig, compiles: bool) -> None:
    asked = f"{what} chose {'sparse attention' if chosen.sparse else ', '.join(chosen.layers)}, which"
    if config.sequence.ring_degree > 1:
        raise UnsupportedError(
            f"{asked} needs all tokens of a head, and {label_of('ring_degree')} is {config.sequence.ring_degree}.",
            "Set it to 0 or 1.",
        )
    if config.pipeline is not None and config.pipeline.patches > 1:
        raise UnsupportedError(f"{asked} needs all tokens at once.", "Set patches of CP PipeFusion to 1.")
    if compiles and (chosen.sparse or any("(" in name for name in chosen.layers)):
        raise UnsupportedError(f"{asked} cannot run in compiled blocks.", "Remove Torch Compile.")


def _layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the functions that the model file chose for layers. Raises UnsupportedError if a layer cannot get it."""
    names = set[str]()
    by_name = bool(PLANS[class_name(model)].attention_names)
    for layer, module, function in layer_functions(model):
        plain = function.func if isinstance(function, partial) else function
        known = any(inspect.unwrap(plain) is inspect.unwrap(each) for each in vars(functions).values() if callable(each))
        if not known or not (by_name or "transformer_options" in inspect.signature(type(module).forward).parameters):
            raise UnsupportedError(
                f"the model file chooses {function_name(function)} for {layer} of {type(model).__name__}, which the workers do not "
                "have."
            )
        names.add(function_name(function))
    return tuple(sorted(names))


def _sparse(override: Any) -> dict[str, Any]:
    """Return the settings of Model Sparse Attention from its override. Raises UnsupportedError for an unknown version of it."""
    patch, node = _held(override).get("patch"), vars(sys.modules.get(override.__module__, sys))
    made = node.get("SparseAttnPatch")
    settings = {} if made is None else {name: getattr(patch, name, None) for name in inspect.signature(made).parameters}
    known = bool(settings) and type(patch) is made and {"make_attention_override", "h3_eligible", "ck"} <= node.keys()
    if not known or not all(isinstance(value, (bool, int, float, str, set)) for value in settings.values()):
        raise UnsupportedError(
            f"{made_by(override)} replaced the attention function by one of its own, in a version of ComfyUI that this extension "
            "does not know."
        )
    return {name: tuple(sorted(value)) if isinstance(value, set) else value for name, value in settings.items()} | {
        "verbose": False
    }


def _without_blocks(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options without the node's patches of MiniMax-H3's blocks: only on one device they save memory."""
    replaced, patch = options.get("patches_replace") or {}, _held(options[OVERRIDE]).get("patch")

    def belongs(each: Any) -> bool:
        return name_of(each) == SPARSE_BLOCK and _held(each).get("patch") is patch

    left = {name: {place: each for place, each in all.items() if not belongs(each)} for name, all in replaced.items()}
    return {**options, "patches_replace": left} if replaced else options


def checked_name(override: Any, device_type: str) -> str:
    """Return the name of a node's attention function. Raises UnsupportedError if ranks on such devices do not have it."""
    node, name = made_by(override), _name_of(override)
    if name is None:
        raise UnsupportedError(
            f"{node} replaced the attention function by one of its own, which the workers do not have. They have ComfyUI's and "
            "those of SageAttention, chosen by Patch Sage Attention KJ."
        )
    shown = f"SageAttention ({name})" if name in SAGE_MODES else name
    if name in ON_CUDA and device_type != "cuda":
        raise UnsupportedError(f"{node} chose the attention function {shown}, which does not run on {device_type}.")
    missing = missing_for(name)
    if missing is not None:
        raise UnsupportedError(
            f"{node} chose the attention function {shown}, which needs {missing}.",
            "Install it into ComfyUI's Python environment, or choose another attention function.",
        )
    return name


def _name_of(override: Any) -> str | None:
    """Return the function's name, or None if it is unknown: an override that holds anything else has separate conditions."""
    held = _held(override)
    is_listed = held.keys() == {OVERRIDES.get(name_in_pack(override))}
    if len(held) != 1 or not (is_listed or _only_calls(override)):
        return None
    (function,) = held.values()
    chosen = inspect.unwrap(function)
    for name, known in functions.REGISTERED_ATTENTION_FUNCTIONS.items():
        if any(function is each for each in _around(known)):
            return str(name) if chosen.__module__ == functions.__name__ else None  # packs may register their own
    if not is_listed:
        return None
    made_by = name_in_pack(chosen)
    if made_by == FLASH_OF_PACK:
        return "flash"
    return _sage_mode(chosen) if made_by == SAGE_OF_PACK else None


FORM = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _around(function: Any) -> Iterator[Any]:
    """Yield a function, and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _only_calls(override: FunctionType) -> bool:
    """Return whether an override does nothing but call what it holds."""
    held = object

    def calls(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    own, other = override.__code__, calls.__code__
    if (own.co_code, own.co_argcount, own.co_kwonlyargcount) != (other.co_code, other.co_argcount, other.co_kwonlyargcount):
        return False
    return own.co_flags & FORM == other.co_flags & FORM and not own.co_consts[1:] and override.__defaults__ is None


def _sage_mode(attention: Callable[..., Any]) -> str | None:
    """Return the mode of KJNodes' function: its inner function closes over SageAttention's and names the precision of its sums."""
    inner = inspect.unwrap(_held(attention).get("sage_func", attention))
    held = _held(inner)
    if "sage_attention" in held:  # it holds the mode itself
        return held["sage_attention"] if held["sage_attention"] in SAGE_MODES else None
    constants = set(getattr(getattr(inner, "__code__", None), "co_consts", ()))
    for name, mode in SAGE_MODES.items():
        if mode.function in held and constants.issuperset(mode.settings.values()):
            return name
    return None


def _held(function: Any) -> Mapping[str, Any]:
    """Return the variables of a closure, by name."""
    return inspect.getclosurevars(function).nonlocals if isinstance(function, FunctionType) else {}
