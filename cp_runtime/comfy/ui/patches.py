"""Other nodes' patches of the transformer, in the UI process: checks, and their value for the ranks."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_patcher
import comfy.sd
from torch import Tensor, nn

from ...errors import MirrorError, UnsupportedError
from ...families import splits_tokens
from ...pool.settings import label_of
from ..shared.assigned import names_in
from ..shared.fingerprint import NOTHING, content_of, digest
from ..shared.forward import OWN, PATCHES
from ..shared.objects import Settings, is_ours, write
from ..shared.pack_objects import OBJECTS, UNLISTED_OBJECT, ObjectPatch
from ..shared.patches import MIRRORED, UNLISTED, Patch, code_of, is_around, listed, map_patches
from ..shared.reached import functions_of_packs, holds_a_model, is_of_pack
from ..shared.weights import PREFIX
from .held import Held
from .networks import code_of_networks, identified
from .noted import FORWARDS, METHODS, NotedHere, paths_of, replaced_in
from .pack_nodes import display_name, made_by, name_in_pack, node_of
from .unlisted import UnlistedPatches
from .watching import has_foreign_wrapper

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
CLASS_OF = frozenset({"isinstance", "issubclass", "type", "vars", "dir"})
_WITHOUT = {name: known.without for name, known in MIRRORED.items() if known.without}
_whole_batch: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The code of the last patches of a UNet that need all of a batch on every rank."""
_calls_so_far: WeakKeyDictionary[nn.Module, tuple[str, int]] = WeakKeyDictionary()
"""The last patches of a model that no table lists, by key, and the calls with them."""


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
        sent: names of globals of node packs that ranks get by value.
        restores: it is the last call again, which changed what is noted.
    """

    encoded: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    mixes_batch: bool = False
    by_conditioning: bool = False
    unlisted: UnlistedPatches | None = None
    compares: bool = False
    sent: tuple[str, ...] = ()
    restores: bool = False

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        model: nn.Module,
        latent: Tensor | None = None,
        patcher: Any = None,
        in_patches: bool = False,
        in_stages: bool = False,
        instead: Mapping[str, Any] = NOTHING,
    ) -> PatchSet:
        """Extract the patches from `transformer_options`, and the object patches inside the transformer from its patcher.

        Args:
            model: the patched transformer.
            latent: the call's, for whose size patches encode their images; None = only check that they can be mirrored.
            patcher: of the model; None = it has no object patches.
            in_patches: the tokens pass through the stages of PipeFusion in several patches.
            in_stages: the model's blocks are in stages.
            instead: a forward in the place of the transformer's own, by name.

        Raises:
            UnsupportedError: one of them cannot be mirrored.
        """
        checked: list[tuple[Any, Patch]] = []
        map_patches(options, lambda where, patch: checked.append((patch, _check(where, patch, model))))
        injections = [] if patcher is None else list(itertools.chain(*patcher.injections.values()))
        checked += [(each.inject, _check("injection", each.inject, model)) for each in injections]
        objects = {} if patcher is None else dict(_objects(patcher))
        # Other forwards run in this process, unless they compute with modules: then they are in `instead`.
        objects = {path: thing for path, thing in {**objects, **replaced_in(model)}.items() if path not in METHODS} | dict(instead)
        kinds = [_check_object(path, thing, model) for path, thing in objects.items()]
        if not checked and not objects:
            return cls()
        for kind in kinds:
            if kind.all_tokens and in_patches:
                raise UnsupportedError(f"{display_name(kind.node)} needs all tokens at once. Set patches of CP PipeFusion to 1.")
        for patch, known in checked:
            if known.prepare is not None and latent is not None:
                known.prepare(patch, latent)
        unlisted = [patch for patch, known in checked if known is UNLISTED]
        paths = [path for path, kind in zip(objects, kinds, strict=True) if kind is UNLISTED_OBJECT]
        unlisted += map(objects.__getitem__, paths)
        references = _References(model, objects, patcher)
        settings = Settings(refer=references, without=_WITHOUT)
        parts = _parts_of(unlisted)
        if latent is not None and patcher is not None:
            _check_injections([each.inject for each in injections if listed(each.inject) is None], patcher)
        noted, sent = None, map_patches(options, lambda _, patch: patch)
        if unlisted and latent is not None:
            noted = NotedHere.by(parts, model, latent.device, partial(_can_be_sent, settings))
        things = {**sent, "objects": objects, "injections": injections, "notes": None if noted is None else vars(noted.notes)}
        try:
            written = write(things, settings)
            if references.takes_own:
                _check_looks(unlisted, patcher)
                written = write({**things, "own": {name: getattr(patcher.model, name) for name in OWN}}, settings)
            of_networks = code_of_networks(references.networks.values(), references.run)
        except MirrorError as error:
            by = _maker([*objects.values(), *(patch for patch, _ in checked)], references)
            raise UnsupportedError(f"{by} patched the transformer with something that cannot be sent: {error}.") from error
        used: list[Patch | ObjectPatch] = [*kinds, *(known for _, known in checked)]
        if unlisted and in_stages and splits_tokens(model):
            raise UnsupportedError(
                f"{made_by(unlisted[0])} needs all tokens at once, which no stage has.",
                f"Set {label_of('weights')} to auto, and leave CP PipeFusion out.",
            )
        code = {**written.all_code, **of_networks}
        key, calls, is_retried = _counted(model, patcher, code) if noted is not None else ("", 0, False)
        watched = noted is not None and (patcher.cp_run.watched or has_foreign_wrapper(options))
        whole_batch = bool(key) and _whole_batch.get(model) == _code_in(key)
        whole = UnlistedPatches(tuple(parts or unlisted), patcher, noted, whole_batch, calls, watched) if unlisted else None
        if whole is not None:
            whole.check_code()
        return cls(
            encoded={
                PATCHES: {
                    "data": base64.b64encode(written.data).decode(),
                    "tensors": written.tensors,
                    "key": key,
                    "unlisted": paths,
                    "on_root": splits_tokens(model) and any(_is_root(path, model) for path in paths),
                }
            },
            networks=references.networks,
            code=code,
            mixes_batch=any(each.mixes_batch for each in used) or whole_batch or (whole is not None and splits_tokens(model)),
            by_conditioning=any(each.by_conditioning for each in used),
            unlisted=whole,
            compares=calls > 0 and calls & (calls - 1) == 0,  # 1, 2, 4, 8, ...: patches may begin to act later
            sent=() if noted is None else noted.notes.sent,
            restores=is_retried,
        )


def _counted(model: nn.Module, patcher: Any, code: Mapping[str, Any]) -> tuple[str, int, bool]:
    """Return a key of the patches that a call has, by run and code; the number of the call, of those of a run with their code; and
    whether it is the last one again, see `take_whole_batch`."""
    key = f"{patcher.cp_run.number} {digest(' '.join(sorted(code)))}"
    last, before = _calls_so_far.get(model, ("", 0))
    calls = before + 1 if last == key else 1
    _calls_so_far[model] = key, calls
    return key, calls, last == key and before == 0


def take_whole_batch(model: nn.Module) -> None:
    """Have the calls that follow compute all of their batch on every rank, with the patches of the last one."""
    key, _ = _calls_so_far[model]
    _whole_batch[model], _calls_so_far[model] = _code_in(key), (key, 0)  # the next call is compared again


def _code_in(key: str) -> str:
    return key.partition(" ")[2]


def _check_injections(unlisted: Iterable[Any], patcher: Any) -> None:
    """Refuse injections whose effect other code may look for in ComfyUI's process, where there is none."""
    for inject in unlisted:
        if patcher.cp_run.watched:
            raise UnsupportedError(f"{made_by(inject)} injects code into the model, which other nodes' code may look for.")


def _check_looks(patches: Iterable[Any], patcher: Any) -> None:
    """Refuse functions that hold the model and ask for its class: the ranks have something in its place."""
    for function in functions_of_packs(patches):
        held = [content_of(cell) for cell in function.__closure__ or ()]
        own = any(each is patcher.model or getattr(each, "model", None) is patcher.model for each in held if holds_a_model(each))
        if (own or patcher.model in held) and names_in(function.__code__) & CLASS_OF:
            raise UnsupportedError(f"{made_by(function)} patched the transformer, and looks at the class of the model.")


def _parts_of(patches: Iterable[Any]) -> list[Any]:
    """Return patches, of modules the ones inside that are of packs."""
    parts = [part for patch in patches for part in (patch.modules() if isinstance(patch, nn.Module) else (patch,))]
    return [part for part in parts if not isinstance(part, nn.Module) or is_of_pack(type(part).__module__)]


def _is_root(path: str, model: nn.Module) -> bool:
    """Return whether an object stands where the code around it has all tokens: in the transformer itself, or around its blocks."""
    inside = getattr(model, path, None)
    return "." not in path and (path in FORWARDS or (isinstance(inside, nn.Module) and next(inside.children(), None) is not None))


def _can_be_sent(settings: Settings, value: Any) -> bool:
    try:
        write(value, settings)
    except MirrorError:
        return False
    return True


def _check(where: str, patch: Any, model: nn.Module) -> Patch:
    """Return the entry of a patch in MIRRORED, or UNLISTED. Raises UnsupportedError if the ranks cannot run it."""
    known = listed(patch)
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
    """Return the entry of an object patch in OBJECTS, or UNLISTED_OBJECT. Raises UnsupportedError if the ranks cannot run it."""
    if path in FORWARDS:
        return UNLISTED_OBJECT
    inside = (thing, model.get_submodule(path)) if "." in path and isinstance(thing, nn.Module) else ()
    if splits_tokens(model) and any(next(each.children(), None) for each in inside):
        raise UnsupportedError(
            f"{made_by(thing)} replaced {path} of {type(model).__name__}, which has modules inside that may compute with tokens "
            "that a rank does not have."
        )
    name = name_in_pack(code_of(thing))
    place = ".".join("*" if part.isdecimal() else part for part in path.split("."))
    known = next((each for each in OBJECTS.get(name, ()) if each.at == place and not is_around(thing)), None)
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
    """What ranks have otherwise: modules of the transformer by path, networks of patches by key, and of a VAE its compression.

    Attributes:
        networks: by key.
        run: of sampling.
        takes_own: patches hold the model around the transformer, or a patcher of it.
    """

    def __init__(self, model: nn.Module, objects: Mapping[str, Any], patcher: Any) -> None:
        self._own: Any = None if patcher is None else patcher.model
        self.run: int = patcher.cp_run.number if hasattr(patcher, "cp_run") else 0  # that of a stock run, and of none
        self.takes_own = False
        placed = {id(thing) for thing in objects.values()}
        self._paths = {number: path for number, path in paths_of(model).items() if number not in placed}
        self.networks: dict[str, nn.Module] = {}

    def __call__(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return "module", self._paths[id(value)]
        is_patcher = isinstance(value, comfy.model_patcher.ModelPatcher)
        if self._own is not None and (value.model if is_patcher else value) is self._own:
            self.takes_own = True
            return "own", "patcher" if is_patcher else "model"
        if is_patcher:
            key = identified(value.model, self.run).key
            self.networks[key] = value.model
            return "network", key
        if is_ours(value):
            return "method", value.method
        if isinstance(value, Held):
            return "held", value.number
        if isinstance(value, comfy.sd.VAE):
            return "compression", value.spacial_compression_encode()
        return None
