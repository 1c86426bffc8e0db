"""Other nodes' patches of the transformer, in the UI process: checks and encoding; and the attention function that a node chose."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import comfy.model_patcher
import comfy.sd
from comfy.ldm.modules import attention as functions
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...pool.protocol import flatten
from ..shared.attention import FLASH_OF_PACK, ON_CUDA, OVERRIDES, SAGE_MODES, SAGE_OF_PACK, missing_for
from ..shared.forward import OBJECTS, PATCHES
from ..shared.modules import encode_module, full_name
from ..shared.patches import MIRRORED, Patch, map_patches, name_of
from .pack_nodes import display_name, made_by, name_in_pack, node_of
from .pack_objects import encode_objects

# Nodes whose patches cannot be mirrored -> reason.
REFUSED: Mapping[str, str] = {
    "HyperTile": "draws random tiles inside the model",
    "TomePatchModel": "draws random tokens inside the model",
    "SelfAttentionGuidance": "reads attention scores out of the model",
    "FluxKVCache": "keeps keys and values of earlier steps inside the model",
    "SUPIRApply": "keeps state between the blocks of the model",
    "HypernetworkLoader": "puts networks into the attention of the model",
    "SDPoseKeypointExtractor": "reads features out of the model",
    "BlockSparseAttention": "chooses which of all tokens a block of them attends to",  # since 0.36
}
OVERRIDE = "optimized_attention_override"
_keys: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_checked: WeakSet[nn.Module] = WeakSet()
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """The patches of one call.

    Args:
        encoded: their form in `transformer_options`: plain data and tensors; empty if there are none.
        networks: their networks, by key.
        classes: those of the patches that are objects.
        mixes_batch: one of them needs all items of the batch.
    """

    encoded: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    classes: frozenset[type] = frozenset()
    mixes_batch: bool = False

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        model: nn.Module,
        latent: Tensor | None = None,
        patcher: Any = None,
        in_patches: bool = False,
    ) -> PatchSet:
        """Extract the patches from `transformer_options`, and the object patches inside the transformer from its patcher.

        Args:
            model: the patched transformer.
            latent: the call's, for whose size patches encode their images; None = only check that they can be mirrored.
            patcher: of the model; None = it has no object patches.
            in_patches: the tokens pass through the stages of PipeFusion in several patches.

        Raises:
            UnsupportedError: one of them cannot be mirrored.
        """
        checked: list[tuple[Any, Patch]] = []
        map_patches(options, lambda where, patch: checked.append((patch, _check(where, patch, model))))
        objects, kinds = encode_objects(patcher) if patcher is not None else ({}, [])
        for kind in kinds:
            if kind.all_tokens and in_patches:
                raise UnsupportedError(f"{display_name(kind.node)} needs all tokens at once. Set patches of CP PipeFusion to 1.")
        for patch, known in checked:
            if known.prepare is not None and latent is not None:
                known.prepare(patch, latent)
        encoder = _Encoder()
        indices = map_patches(options, lambda _, patch: encoder.index(patch))  # all are prepared, as one may refer to another
        encoded = {PATCHES: {"entries": encoder.entries, **indices}} if encoder.entries else {}
        encoded |= {OBJECTS: objects} if objects else {}
        _check_plain(encoded, encoder.modules)
        mixes_batch = any(kind.mixes_batch for kind in kinds)
        mixes_batch |= any(MIRRORED[entry["name"]].mixes_batch for entry in encoder.entries)
        classes = frozenset(type(patch) for patch, _ in checked if not isinstance(patch, FunctionType))
        return cls(encoded=encoded, networks=encoder.modules, classes=classes, mixes_batch=mixes_batch)


def _check(where: str, patch: Any, model: nn.Module) -> Patch:
    """Return the entry of a patch in MIRRORED. Raises UnsupportedError if there is none for it."""
    known = MIRRORED.get(name_of(patch))
    if known is None:
        reason = REFUSED.get(node_of(patch) or "", "the workers do not have that code")
        raise UnsupportedError(f"{made_by(patch)} patched the transformer ({where}) and {reason}.")
    if type(model).__name__ in known.unless:
        node = made_by(patch, known.node)
        raise UnsupportedError(f"{node} ({where}) cannot be applied to a part of the tokens of {type(model).__name__}.")
    return known


def _check_plain(encoded: dict[str, Any], networks: Mapping[str, nn.Module]) -> None:
    try:
        flatten(encoded, lambda tensor, path: None)
        for network in networks.values():
            if network not in _checked:
                flatten(encode_module(network), lambda tensor, path: None)
                _checked.add(network)
    except UnsupportedError as error:
        raise UnsupportedError(f"a patch of the transformer holds something else than plain data: {error}.") from error


class _Encoder:
    """An encoder of patches. They may share objects: each becomes one entry of a list."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.modules: dict[str, nn.Module] = {}
        self._seen: dict[int, int] = {}

    def index(self, patch: Any) -> int:
        if id(patch) not in self._seen:
            self._seen[id(patch)] = len(self.entries)
            self.entries.append({})
            self.entries[self._seen[id(patch)]] = self._entry(patch)
        return self._seen[id(patch)]

    def _entry(self, patch: Any) -> dict[str, Any]:
        name = name_of(patch)
        if not isinstance(patch, FunctionType):
            without = MIRRORED[name].without
            return {"name": name, "data": {k: None if k in without else self._pack(v) for k, v in vars(patch).items()}}
        data = {variable: self._pack(value) for variable, value in inspect.getclosurevars(patch).nonlocals.items()}
        return {"name": name, "data": data, "defaults": patch.__defaults__}

    def _pack(self, value: Any) -> Any:
        if isinstance(value, comfy.model_patcher.ModelPatcher):
            key = _keys.setdefault(value.model, f"m{next(_numbers)}")
            self.modules[key] = value.model
            return {"$module": key}
        if isinstance(value, comfy.sd.VAE):
            return {"$vae": value.spacial_compression_encode()}
        if full_name(type(value)) in MIRRORED:
            return {"$patch": self.index(value)}
        return value


def attention_of(options: Mapping[str, Any], device_type: str) -> str | None:
    """Return the name of a node's attention function (see `shared.attention`), or None. `device_type`: of the ranks. Raises
    UnsupportedError if the ranks do not have it, or the override is unknown."""
    override = options.get(OVERRIDE)
    if override is None:
        return None
    node, name = made_by(override), _name_of(override)
    if name is None:
        raise UnsupportedError(
            f"{node} replaced the attention function by one of its own, which the workers do not have. They have ComfyUI's and "
            "those of SageAttention, chosen by Patch Sage Attention KJ."
        )
    if name in ON_CUDA and device_type != "cuda":
        raise UnsupportedError(f"{node} chose the attention function {name}, which does not run on {device_type}.")
    missing = missing_for(name)
    if missing is not None:
        raise UnsupportedError(
            f"{node} chose the attention function {name}, which needs {missing}. Install it into ComfyUI's Python environment, or "
            "choose another attention function."
        )
    return name


def _name_of(override: Any) -> str | None:
    """Return the function's name, or None if it is unknown: an override that holds anything else has separate conditions."""
    variable = OVERRIDES.get(name_in_pack(override))
    held = _held(override)
    if variable is None or set(held) != {variable}:
        return None
    chosen = inspect.unwrap(held[variable])
    for name, function in functions.REGISTERED_ATTENTION_FUNCTIONS.items():
        if chosen is inspect.unwrap(function):
            return str(name) if chosen.__module__ == functions.__name__ else None  # packs may register their own
    made_by = name_in_pack(chosen)
    if made_by == FLASH_OF_PACK:
        return "flash"
    return _sage_mode(chosen) if made_by == SAGE_OF_PACK else None


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
