"""Other nodes' patches of the transformer, in the UI process: checks, and their value for the ranks."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import comfy.model_patcher
import comfy.sd
from torch import Tensor, nn

from ...compat import versions
from ...errors import MirrorError, UnsupportedError
from ...families import splits_tokens
from ..shared.assigned import names_in
from ..shared.fingerprint import classes_of
from ..shared.forward import PATCHES
from ..shared.modules import full_name
from ..shared.objects import Settings, Written, write
from ..shared.pack_objects import OBJECTS, UNLISTED_OBJECT, ObjectPatch
from ..shared.patches import MIRRORED, UNLISTED, Patch, code_of, map_patches, name_of
from ..shared.weights import PREFIX
from .pack_nodes import display_name, made_by, name_in_pack, node_of
from .unlisted import UnlistedPatches

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
FORWARDS = ("forward", "_forward", "forward_orig")
_WITHOUT = {name: known.without for name, known in MIRRORED.items() if known.without}
_keys: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_checked: WeakSet[nn.Module] = WeakSet()
_numbers = itertools.count()
_last: WeakKeyDictionary[nn.Module, _Last] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """The patches of one call.

    Args:
        encoded: their form in `transformer_options`: plain data and tensors; empty if there are none.
        networks: their networks, by key.
        code: classes and functions that compute with them, by name.
        mixes_batch: one of them needs all items of the batch.
        by_conditioning: one of them needs all items of a conditioning.
        unlisted: those that no table lists; None = there are none.
        compares: this call is to be compared with one device.
    """

    encoded: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    mixes_batch: bool = False
    by_conditioning: bool = False
    unlisted: UnlistedPatches | None = None
    compares: bool = False

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        model: nn.Module,
        latent: Tensor | None = None,
        patcher: Any = None,
        in_patches: bool = False,
        in_stages: bool = False,
    ) -> PatchSet:
        """Extract the patches from `transformer_options`, and the object patches inside the transformer from its patcher.

        Args:
            model: the patched transformer.
            latent: the call's, for whose size patches encode their images; None = only check that they can be mirrored.
            patcher: of the model; None = it has no object patches.
            in_patches: the tokens pass through the stages of PipeFusion in several patches.
            in_stages: the model's blocks are in stages.

        Raises:
            UnsupportedError: one of them cannot be mirrored.
        """
        checked: list[tuple[Any, Patch]] = []
        map_patches(options, lambda where, patch: checked.append((patch, _check(where, patch, model))))
        objects = dict(_objects(patcher)) if patcher is not None else {}
        kinds = [_check_object(path, thing, model) for path, thing in objects.items()]
        if not checked and not objects:
            return cls()
        for kind in kinds:
            if kind.all_tokens and in_patches:
                raise UnsupportedError(f"{display_name(kind.node)} needs all tokens at once. Set patches of CP PipeFusion to 1.")
        for patch, known in checked:
            if known.prepare is not None and latent is not None:
                known.prepare(patch, latent)
        references = _References(model, objects)
        things = {**map_patches(options, lambda _, patch: patch), "objects": objects}
        try:
            written = write(things, Settings(refer=references, without=_WITHOUT))
            for network in references.networks.values():
                if network not in _checked:
                    write(network)
                    _checked.add(network)
        except MirrorError as error:
            by = _maker([*objects.values(), *(patch for patch, _ in checked)], references)
            raise UnsupportedError(f"{by} patched the transformer with something that cannot be sent: {error}.") from error
        classes = written.classes.union(*map(classes_of, references.networks.values()))
        used: list[Patch | ObjectPatch] = [*kinds, *(known for _, known in checked)]
        unlisted = [patch for patch, known in checked if known is UNLISTED]
        paths = [path for path, kind in zip(objects, kinds, strict=True) if kind is UNLISTED_OBJECT]
        unlisted += map(objects.__getitem__, paths)
        if unlisted and in_stages and splits_tokens(model):
            raise UnsupportedError(
                f"{made_by(unlisted[0])} needs all tokens at once, which no stage has. Set weights of CP Config "
                "to auto, and leave CP PipeFusion out."
            )
        code = {**written.code, **{full_name(cls): cls for cls in classes}}
        key, compares = _noted(model, patcher, written, code) if unlisted and latent is not None else ("", False)
        whole = UnlistedPatches(tuple(unlisted), patcher) if unlisted else None
        if whole is not None:
            whole.check_code()
        return cls(
            encoded={
                PATCHES: {
                    "data": base64.b64encode(written.data).decode(),
                    "tensors": written.tensors,
                    "key": key,
                    "unlisted": paths,
                }
            },
            networks=references.networks,
            code=code,
            mixes_batch=any(each.mixes_batch for each in used) or (whole is not None and splits_tokens(model)),
            by_conditioning=any(each.by_conditioning for each in used),
            unlisted=whole,
            compares=compares,
        )


class _Last(NamedTuple):
    """The last patches of a model: the run, their code by name, their data, and the key by which ranks keep them."""

    run: int
    code: frozenset[str]
    data: bytes
    tensors: tuple[int, ...]  # their ids
    counts: tuple[tuple[int, ...] | None, ...]
    key: str
    calls: int  # of the run, with this code


def _noted(model: nn.Module, patcher: Any, written: Written, code: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the key of the patches that a call has, and whether to compare it: the calls 1, 2, 4, 8, ... of a run with their code,
    as they may begin to act later. The key is another one after a change in this process: ranks take them anew then."""
    run, counts = patcher.cp_run.number, tuple(versions([tensor]) for tensor in written.tensors)
    last = _last.get(model)
    now = run, frozenset(code), written.data, tuple(map(id, written.tensors)), counts
    calls = last.calls + 1 if last is not None and last[:2] == now[:2] else 1
    key = last.key if last is not None and last[:5] == now else f"{run} {next(_numbers)}"
    _last[model] = _Last(*now, key, calls)
    return key, calls & (calls - 1) == 0


def _check(where: str, patch: Any, model: nn.Module) -> Patch:
    """Return the entry of a patch in MIRRORED, or UNLISTED. Raises UnsupportedError if the ranks cannot run it."""
    known = MIRRORED.get(name_of(patch))
    if known is None:
        reason = REFUSED.get(node_of(patch) or "")
        if reason is None:
            return UNLISTED
        raise UnsupportedError(f"{made_by(patch)} patched the transformer ({where}) and {reason}.")
    if type(model).__name__ in known.unless:
        node = made_by(patch, known.node)
        raise UnsupportedError(f"{node} ({where}) cannot be applied to a part of the tokens of {type(model).__name__}.")
    return known


def _objects(patcher: Any) -> Iterator[tuple[str, Any]]:
    """Yield the object patches inside the transformer by their path there."""
    for name, thing in patcher.object_patches.items():
        if name.split(".")[0] == PREFIX[:-1]:
            yield name.removeprefix(PREFIX), thing


def _check_object(path: str, thing: Any, model: nn.Module) -> ObjectPatch:
    """Return the entry of an object patch in OBJECTS, or UNLISTED_OBJECT. Raises UnsupportedError if it is the transformer's."""
    if path in FORWARDS:
        raise UnsupportedError(f"{made_by(thing)} replaced the forward of {type(model).__name__}.")
    is_module = isinstance(thing, nn.Module)
    if splits_tokens(model) and is_module and any(next(each.children(), None) for each in (thing, model.get_submodule(path))):
        raise UnsupportedError(
            f"{made_by(thing)} replaced {path} of {type(model).__name__}, which has modules inside that may compute with tokens "
            "that a rank does not have."
        )
    name = name_in_pack(code_of(thing))
    place = ".".join("*" if part.isdecimal() else part for part in path.split("."))
    known = next((each for each in OBJECTS.get(name, ()) if each.at == place), None)
    if known is None or not type(model).__module__.startswith(known.models):
        return UNLISTED_OBJECT
    is_listed = not known.helper or _calls(code_of(thing), known.helper)  # else it is of another version of that pack
    return known if is_listed else UNLISTED_OBJECT


def _calls(function: FunctionType, name: str) -> bool:
    """Return whether a function, or another one of its module that it calls, calls one of this name there."""
    others = (function.__globals__.get(each) for each in names_in(function.__code__))
    bodies = [function.__code__, *(each.__code__ for each in others if isinstance(each, FunctionType))]
    return name in function.__globals__ and any(name in names_in(body) for body in bodies)


def _maker(patches: Iterable[Any], references: _References) -> str:
    """Return the user's name for the node behind the first patch that cannot be written."""
    for patch in patches:
        try:
            write(patch, Settings(refer=references, without=_WITHOUT))
        except MirrorError:
            return made_by(patch)
    return "a node"


class _References:
    """What ranks have otherwise: modules of the transformer by path, networks of patches by key, and of a VAE its compression."""

    def __init__(self, model: nn.Module, objects: Mapping[str, Any]) -> None:
        placed = {id(part) for thing in objects.values() if isinstance(thing, nn.Module) for part in thing.modules()}
        self._paths = {id(module): path for path, module in model.named_modules() if id(module) not in placed}
        self.networks: dict[str, nn.Module] = {}

    def __call__(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return "module", self._paths[id(value)]
        if isinstance(value, comfy.model_patcher.ModelPatcher):
            key = _keys.setdefault(value.model, f"m{next(_numbers)}")
            self.networks[key] = value.model
            return "network", key
        if isinstance(value, comfy.sd.VAE):
            return "compression", value.spacial_compression_encode()
        return None
