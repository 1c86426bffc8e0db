"""Patches that other nodes put into the transformer, on a rank."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from ...compat import versions
from ...engine.call import RunningCall
from ...errors import MirrorError
from ...recent import Recent
from ..shared.objects import Settings, write
from ..shared.patches import MIRRORED, UNLISTED, map_patches, name_of
from .attributes import attributes_of, globals_of, restore
from .objects import read
from .whole_tokens import InPlace, WholeTokens

ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""Networks of patches, by key."""


class Kept:
    """Patches of a model as this rank has read them, some of which no table lists."""

    def __init__(self, things: Any, model: nn.Module) -> None:
        self.things = things
        self.places: dict[object, Any] = {}  # see `WholeTokens`
        self._attributes = attributes_of(model)
        self._modules = {id(module): path for path, module in model.named_modules()}
        self._first = self._content()

    def changed(self) -> bool:
        """Return whether calls have changed them, or what they reach. Modules are as before then."""
        return restore(self._attributes) or self._first != self._content()

    def _content(self) -> tuple[object, ...]:
        try:
            written = write(self.things, Settings(refer=self._refer))
        except MirrorError as error:  # with something that no process can be sent: an open file, a lock
            return (str(error),)
        tensors = [(each.data_ptr(), versions([owner])) for each, owner in zip(written.tensors, written.owners, strict=True)]
        return written.data, tensors, globals_of(self.things)

    def _refer(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return "module", self._modules[id(value)]
        return ("network", id(value)) if isinstance(value, comfy.model_patcher.ModelPatcher) else None


KEPT: Recent[str, Kept] = Recent(8)
"""Patches that no table lists, by key. A sampling run begins with new ones."""


def attach_network(key: str, module: nn.Module, device: torch.device) -> None:
    ATTACHED[key] = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))


def read_patches(encoded: Mapping[str, Any], model: nn.Module, call: RunningCall, device: torch.device) -> dict[str, Any]:
    """Read the patches of a call: `patches` and `patches_replace` of transformer_options, which expect this rank's tokens, and
    object patches by their path in the model, as `objects`."""
    have: dict[str, Callable[[Any], Any]] = {
        "module": model.get_submodule,
        "network": ATTACHED.__getitem__,
        "compression": lambda factor: SimpleNamespace(spacial_compression_encode=lambda: factor),
    }
    key = encoded["key"]
    kept = KEPT.get(key)
    if kept is None:
        data = base64.b64decode(encoded["data"])
        things = read(data, encoded["tensors"], device, lambda reference: have[reference[0]](reference[1])).thing
        if key:
            kept = KEPT[key] = Kept(things, model)
    else:
        things = kept.things
    places = {} if kept is None else kept.places

    def on_all_tokens(where: str, thing: Any) -> WholeTokens:
        return WholeTokens(thing, call, f"{name_of(thing)} ({where})", places)

    def adapted(where: str, patch: Any) -> Any:
        known = MIRRORED.get(name_of(patch), UNLISTED)
        if known is UNLISTED:
            return on_all_tokens(where, patch)
        return known.adapt(patch, call) if known.adapt and call.mesh.size > 1 else patch

    objects = dict(things["objects"])
    for path in encoded["unlisted"]:
        thing = objects[path]
        if isinstance(thing, nn.Module):
            objects[path] = InPlace(thing, on_all_tokens(path, thing.forward))
        elif callable(thing):
            objects[path] = on_all_tokens(path, thing)
    return {**map_patches(things, adapted), "objects": objects}
