"""Patches that other nodes put into the transformer, on a rank."""

from __future__ import annotations

import base64
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import comfy.model_patcher
import numpy
import torch
from torch import Tensor, nn

from ...engine.call import RunningCall
from ...errors import MirrorError, PatchError
from ...recent import Recent
from ..shared.noted import Notes
from ..shared.patches import listed, map_patches, name_of
from .injections import Injections
from .noted import HELD, NotesHere
from .objects import read
from .pack_objects import attention_names, objects_in_place
from .whole_tokens import PATCHES, InPlace, WholeTokens

ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""Networks of patches, by key."""


BY_COMFYUI = frozenset((
    "activations_shape", "ar_state", "block", "block_index", "block_type", "chroma_radiance_options", "grid_sizes", "img_slice",
    "model_patch_data", "multigpu_thread_device", "original_shape", "reference_image_num_tokens", "rope_options", "total_blocks",
    "transformer_index", "x_ref_attn_map",
))  # fmt: skip
"""Entries of transformer_options that ComfyUI's forwards write."""
PLACES: Recent[str, dict[object, Any]] = Recent(8)
"""Where tokens are in what patches get, by the key of the patches: see `WholeTokens`."""


class Own:
    """Something of the sampled model's, for code of nodes that holds it: it has a part of the attributes, and notes what code asks
    for or sets besides."""

    def __init__(self, asked: list[str], **has: Any) -> None:
        vars(self).update(has, _asked=asked)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self._asked.append(name)
        raise AttributeError(f"the workers' model has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._asked.append(name)

    def __delattr__(self, name: str) -> None:
        self._asked.append(name)


class OwnPatcher(Own):
    """The sampled model's patcher."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        asked: list[str] = []
        model = Own(asked, diffusion_model=network, device=device)
        super().__init__(asked, model=model, load_device=device)

    @property
    def asked(self) -> list[str]:
        return self._asked

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
        own: the model's patcher, for their code.
    """

    options: Mapping[str, Any]
    objects: Mapping[str, Any]
    notes: NotesHere | None
    on_all: Callable[[str, Any], WholeTokens] | None
    injections: Injections
    own: OwnPatcher

    @contextmanager
    def in_place(self, model: nn.Module, call: RunningCall, options: dict[str, Any]) -> Iterator[None]:
        """Have objects and notes stand in the model, while active. `options`: of the call, which code may write to."""
        objects = objects_in_place(self.objects, model, call) if self.objects else nullcontext()
        notes = self.notes
        drawn = None if notes is None else _random_states(self.own.load_device)
        before = [] if notes is None else [(each, dict(each)) for each in _dicts_in(options)]
        with objects, nullcontext() if notes is None else notes.in_place(), self.injections.in_place(model, notes, call.mesh.whole):
            yield
        if notes is not None:
            written = {key for each, held in before for key in each if each[key] is not held.get(key, each)}
            notes.wrote = sorted(map(str, written - BY_COMFYUI))
        if self.own.asked:
            raise PatchError(f"it uses {self.own.asked[0]} of the model, which the workers do not have")
        if drawn is not None and not all(map(_equal, drawn, _random_states(self.own.load_device))):
            raise PatchError("it draws random numbers")

    @property
    def attention_names(self) -> frozenset[str]:
        """Names under which code may call ComfyUI's attention without `transformer_options`; of the model, where code of node packs
        runs its blocks."""
        return attention_names(self.objects, self.notes is not None)

    def forward(self, stock: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        """Return the model's forward in the place of its own."""
        forward = vars(model).get(stock.__name__, stock)
        return forward if self.on_all is None else self.on_all(stock.__name__, forward)


def _dicts_in(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of a call and dicts in them, but those of patches."""
    inside = (value for key, value in options.items() if key not in PATCHES and type(value) is dict)
    return [options, *(each for value in inside for each in _dicts_in(value))]


def _random_states(device: torch.device) -> list[Any]:
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    _, numbers, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    return [random.getstate(), (numbers.tobytes(), *rest), torch.get_rng_state(), *own]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


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
    try:
        things = read(data, encoded["tensors"], device, lambda reference: have[reference[0]](reference[1])).thing
    except (MirrorError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a pack's classes
        raise PatchError(f"something of it cannot be made there ({type(error).__name__}: {error})") from error
    vars(own.model).update(things.get("own", {}))
    places = PLACES.setdefault(encoded["key"], {})

    def on_all_tokens(where: str, thing: Any, is_model: bool = False) -> WholeTokens:
        return WholeTokens(thing, call, f"{name_of(thing)} ({where})", places, is_model)

    def adapted(where: str, patch: Any) -> Any:
        known = listed(patch)
        if isinstance(patch, tuple):  # a class of layers, and the code for these
            return tuple(each if isinstance(each, type) else adapted(where, each) for each in patch)
        if known is None or encoded["on_root"]:
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
        own,
    )
