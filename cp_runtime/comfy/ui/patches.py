"""Other nodes' patches of the transformer, in the UI process: checks and encoding."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import comfy.model_patcher
import comfy.sd
from torch import Tensor, nn

from ...errors import MirrorError, UnsupportedError
from ...pool.protocol import flatten
from ..shared.fingerprint import alone, classes_of
from ..shared.forward import OBJECTS, PATCHES
from ..shared.modules import full_name
from ..shared.patches import MIRRORED, Patch, map_patches, name_of
from .objects import write
from .pack_nodes import display_name, made_by, node_of
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
}
_keys: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_checked: WeakSet[nn.Module] = WeakSet()
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """The patches of one call.

    Args:
        encoded: their form in `transformer_options`: plain data and tensors; empty if there are none.
        networks: their networks, by key.
        code: classes and functions that compute with them, by name.
        mixes_batch: one of them needs all items of the batch.
    """

    encoded: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
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
        code = {name_of(patch): alone(patch) if isinstance(patch, FunctionType) else type(patch) for patch, _ in checked}
        code |= {full_name(kind): kind for network in encoder.modules.values() for kind in classes_of(network)}
        return cls(encoded=encoded, networks=encoder.modules, code=code, mixes_batch=mixes_batch)


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
                write(network)
                _checked.add(network)
    except (MirrorError, UnsupportedError) as error:
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
