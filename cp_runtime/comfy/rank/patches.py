"""Patches that other nodes put into the transformer, on a rank."""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from ...engine.call import RunningCall
from ...recent import Recent
from ..shared.noted import Notes
from ..shared.patches import MIRRORED, UNLISTED, map_patches, name_of
from .injections import Injections
from .noted import HELD, NotesHere
from .objects import read
from .pack_objects import attention_names, objects_in_place
from .whole_tokens import InPlace, WholeTokens

ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""Networks of patches, by key."""


PLACES: Recent[str, dict[object, Any]] = Recent(8)
"""Where tokens are in what patches get, by the key of the patches: see `WholeTokens`."""


class OwnPatcher:
    """The sampled model's patcher, for code of nodes that holds it."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.model, self.load_device = SimpleNamespace(diffusion_model=network, device=device), device

    def get_model_object(self, name: str) -> Any:
        return operator.attrgetter(name)(self.model)


@dataclass(frozen=True)
class CallPatches:
    """The patches of a call, as this rank applies them.

    Args:
        options: `patches` and `patches_replace` of transformer_options, which expect this rank's tokens.
        objects: object patches, by their path in the model.
        notes: what those that no table lists have noted; None = there are none.
        on_all: makes code that gets all tokens, where the model's forward is such code.
        injections: code that puts something into the model for the time of the call.
    """

    options: Mapping[str, Any]
    objects: Mapping[str, Any]
    notes: NotesHere | None
    on_all: Callable[[str, Any], WholeTokens] | None
    injections: Injections

    @contextmanager
    def in_place(self, model: nn.Module, call: RunningCall) -> Iterator[None]:
        """Have objects and notes stand in the model, while active."""
        objects = objects_in_place(self.objects, model, call) if self.objects else nullcontext()
        with objects, nullcontext() if self.notes is None else self.notes.in_place(), self.injections.in_place(model):
            yield

    @property
    def attention_names(self) -> frozenset[str]:
        """Names under which code may call ComfyUI's attention without `transformer_options`; of the model, where code of node packs
        runs its blocks."""
        return attention_names(self.objects, self.notes is not None)

    def forward(self, stock: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        """Return the model's forward in the place of its own."""
        forward = vars(model).get(stock.__name__, stock)
        return forward if self.on_all is None else self.on_all(stock.__name__, forward)


def attach_network(key: str, module: nn.Module, device: torch.device) -> None:
    ATTACHED[key] = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))


def read_patches(encoded: Mapping[str, Any], model: nn.Module, call: RunningCall, device: torch.device) -> CallPatches:
    """Read the patches of a call."""
    own = OwnPatcher(model, device)
    have: dict[str, Callable[[Any], Any]] = {
        "own": lambda kind: own if kind == "patcher" else own.model,
        "module": model.get_submodule,
        "method": lambda name: getattr(type(model), name).__get__(model),
        "network": ATTACHED.__getitem__,
        "compression": lambda factor: SimpleNamespace(spacial_compression_encode=lambda: factor),
        "held": HELD.__getitem__,
    }
    data = base64.b64decode(encoded["data"])
    things = read(data, encoded["tensors"], device, lambda reference: have[reference[0]](reference[1])).thing
    vars(own.model).update(things.get("own", {}))
    places = PLACES.setdefault(encoded["key"], {})

    def on_all_tokens(where: str, thing: Any, is_model: bool = False) -> WholeTokens:
        return WholeTokens(thing, call, f"{name_of(thing)} ({where})", places, is_model)

    def adapted(where: str, patch: Any) -> Any:
        known = MIRRORED.get(name_of(patch), UNLISTED)
        if known is UNLISTED or encoded["on_root"]:
            return on_all_tokens(where, patch)
        return known.adapt(patch, call) if known.adapt and call.mesh.size > 1 else patch

    objects = dict(things["objects"])
    for path in encoded["unlisted"]:
        thing, on_all = objects[path], encoded["on_root"] and "." not in path  # its caller has all tokens already
        if isinstance(thing, nn.Module):
            objects[path] = InPlace(thing, thing.forward if on_all else on_all_tokens(path, thing.forward))
        elif callable(thing) and not on_all:
            objects[path] = on_all_tokens(path, thing)
    return CallPatches(
        map_patches(things, adapted),
        objects,
        None if things["notes"] is None else NotesHere(Notes(**things["notes"]), model),
        partial(on_all_tokens, is_model=True) if encoded["on_root"] else None,
        Injections(things["injections"], own, on_all_tokens),
    )
