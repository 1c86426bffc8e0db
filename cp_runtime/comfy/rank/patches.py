"""Patches that other nodes put into the transformer, rebuilt on a rank."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from ...engine.call import RunningCall
from ...errors import MirrorError
from ..shared.fingerprint import bodies_in
from ..shared.modules import LOCALS, find
from ..shared.patches import MIRRORED, map_patches

ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""Networks of patches, by key."""


def attach_network(key: str, module: nn.Module, device: torch.device) -> None:
    ATTACHED[key] = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))


def decode_node_patches(encoded: dict[str, Any], call: RunningCall) -> dict[str, Any]:
    """Rebuild the entries `patches` and `patches_replace` of transformer_options on this rank."""
    decoder = _Decoder(encoded["entries"])

    def patch(_: str, index: int) -> Callable[..., Any]:
        made, adapt = decoder.get(index), MIRRORED[encoded["entries"][index]["name"]].adapt
        return adapt(made, call) if adapt and call.mesh.size > 1 else made

    return map_patches(encoded, patch)


class _Decoder:
    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        self._made: dict[int, Any] = {}

    def get(self, index: int) -> Any:
        if index not in self._made:
            entry = self._entries[index]
            if entry["name"] not in MIRRORED:
                raise MirrorError(f"{entry['name']} is not a patch that the workers know")
            make = self._function if LOCALS in entry["name"] else self._object
            self._made[index] = make(entry)
        return self._made[index]

    def _object(self, entry: dict[str, Any]) -> Any:
        cls = find(entry["name"])
        patch = cls.__new__(cls)
        vars(patch).update({name: self._unpack(value) for name, value in entry["data"].items()})
        return patch

    def _function(self, entry: dict[str, Any]) -> FunctionType:
        outer, _, name = entry["name"].partition(LOCALS)
        bodies, namespace = bodies_in(outer, name)
        if len(bodies) != 1 or set(bodies[0].co_freevars) != entry["data"].keys():
            raise MirrorError(f"{entry['name']} is another function in this ComfyUI than in the one that sent it")
        cells = tuple(CellType(self._unpack(entry["data"][variable])) for variable in bodies[0].co_freevars)
        return FunctionType(bodies[0], namespace, name, entry["defaults"], cells)

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) == 1:
            ((kind, body),) = value.items()
            if kind == "$module":
                return ATTACHED[body]
            if kind == "$vae":
                return SimpleNamespace(spacial_compression_encode=lambda: body)
            if kind == "$patch":
                return self.get(body)
        return value
