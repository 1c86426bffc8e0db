"""The code that this process computes with, against that of the ranks: see `shared.fingerprint`.

Ranks import ComfyUI afresh, and the node packs whose code is found here, as ComfyUI has imported them. What differs then is
refused: a pack or a node has replaced it since, or in a way that an import does not repeat.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from comfy.lora import calculate_weight
from torch import nn

from ...controller.calls import Code as PatchCode
from ...errors import ON_ONE_DEVICE, UnsupportedError
from ...pool.messages import Described, Loaded
from ..shared.fingerprint import Code, code_of, differing, digest_of, found
from ..shared.modules import PACKS, full_name
from ..shared.objects import Settings, write
from ..shared.weights import network_of, sample
from .notes import Asking
from .packs import in_order, is_comfy, pack_of, packs_naming, packs_of
from .weight_patches import code_of_weight_patches

OF_MODEL = (
    "Remove that node, then have the model loaded again: Edit, Unload Models and Execution Cache, or restart ComfyUI. Or "
    f"{ON_ONE_DEVICE}."
)
"""What a node changes in a model stays there without the node."""
_codes: WeakKeyDictionary[nn.Module, dict[tuple[frozenset[type], tuple[str, ...]], Code]] = WeakKeyDictionary()
_naming: set[str] = set()
"""Packs that have changed constants: see `_packs_behind`."""
_of_patches: dict[tuple[Any, ...], tuple[Code, PatchCode]] = {}
_confirmed: WeakKeyDictionary[nn.Module, tuple[tuple[frozenset[type], tuple[str, ...]], Code]] = WeakKeyDictionary()
_first: WeakKeyDictionary[nn.Module, tuple[bytes, tuple[str, ...]]] = WeakKeyDictionary()


def code_behind(model: Any, classes: frozenset[type], roots: tuple[str, ...] = ()) -> Code:
    """Return the code of a model or a VAE with modules of these classes, and of classes and functions by name; what is known of it
    while that holds."""
    known, of = _codes.setdefault(network_of(model), {}), (classes, roots)
    ours = known.get(of)
    if ours is None or not ours.holds():
        ours = known[of] = code_of(classes, {name: found(name) for name in roots})
    return ours


def code_of_patches(patches: Mapping[str, Any], sent: Collection[str] = ()) -> PatchCode | None:
    """Return the code of a call's patches, classes and functions by name, to compare with the ranks'; None without any.

    `sent`: names of globals that ranks get by value.
    """
    if not patches:
        return None
    names = tuple(sorted(patches))
    key = names, tuple(sent)
    known = _of_patches.get(key)
    if known is None or not known[0].holds():
        ours = code_of(roots=patches)
        ours = replace(ours, hashes=_without(sent, ours.hashes))
        packs, compare = in_order(packs_of(ours.files.values())), partial(_compare_patches, ours, sent)
        known = ours, PatchCode(roots=names, packs=packs, digest=digest_of(ours.hashes), compare=compare)
        _of_patches[key] = known
    return known[1]


def _without(sent: Collection[str], hashes: Mapping[str, str]) -> dict[str, str]:
    def is_sent(name: str) -> bool:
        module, _, inner = name.partition(":")  # `module:name.attribute`, `module:name[key]`
        return f"{module}:{re.split('[.<[]', inner)[0]}" in sent

    return {name: each for name, each in hashes.items() if not is_sent(name)}


def check_code(model: Any) -> None:
    """Refuse a model with other code than at its load onto the ranks. It takes some 50 µs while nothing has changed."""
    network = network_of(model)
    confirmed = _confirmed.get(network)
    if confirmed is None or confirmed[1].holds():
        return
    of, before = confirmed
    now = code_behind(model, *of)
    if now.hashes == before.hashes:
        _confirmed[network] = of, now
    else:
        raise _replaced(now, before.hashes, {})


@dataclass(frozen=True)
class ModelFingerprint:
    """A `target.Fingerprint` of a ModelPatcher's model or VAE. `classes`: of its modules. `names`: of further code in these."""

    patcher: Any
    classes: frozenset[type]
    names: frozenset[str] = frozenset()

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Return the names of the code that its modules hold, and of that which makes weights of the patcher's weight patches."""
        patches = self.patcher.patches
        return tuple(sorted({*self.names, *({full_name(calculate_weight)} | code_of_weight_patches(patches) if patches else ())}))

    @property
    def packs(self) -> tuple[str, ...]:
        return in_order({*packs_of(code_behind(self.patcher.model, self.classes, self.roots).files.values()), *_naming})

    def compare(self, replies: Sequence[Loaded], ask: Asking) -> None:
        model, of = self.patcher.model, (self.classes, self.roots)
        ours = code_behind(model, *of)
        if any(digest_of(ours.hashes) != reply.code for reply in replies):
            described = ask(())
            if more := _packs_behind(ours, described):
                described = ask(more)
            for each in described:
                if ours.hashes != each.code:
                    raise _replaced(ours, each.code, each.failed)
            _naming.update(more)
        _confirmed[network_of(model)] = of, ours


def _packs_behind(ours: Code, described: Sequence[Described]) -> set[str]:
    """Return packs that may have changed constants which the ranks have otherwise: no code tells whose such a change is."""
    names = {name for each in described for name in differing(ours.hashes, each.code) if not pack_of(ours.files.get(name, ""))}
    return packs_naming({name.rpartition(":")[2].rpartition(".")[2].partition("[")[0] for name in names}) if names else set()


def _compare_patches(ours: Code, sent: Collection[str], replies: Sequence[Described]) -> None:
    for reply in replies:
        theirs = _without(sent, reply.code)
        if differing(ours.hashes, theirs):
            raise _replaced(ours, theirs, reply.failed)


def _replaced(ours: Code, theirs: Mapping[str, str], failed: Mapping[str, str]) -> UnsupportedError:
    """Build the refusal of code that the ranks have otherwise. Of several differences it names what a pack has replaced."""
    names = differing(ours.hashes, theirs)
    files = {name: ours.files.get(name, "") for name in names}
    both = [name for name in names if name in ours.hashes and name in theirs] or names
    packs = {name: pack_of(files[name]) or _pack_in(name) for name in both}
    name = min(both, key=lambda each: (not packs[each], bool(not files[each] or is_comfy(files[each])), each))
    shown, pack = name.replace(":", "."), packs[name]
    if not pack:
        by = "a node pack, a script or an update of ComfyUI's files"
        why, remedy = "the workers have it as ComfyUI imports it now", "Restart ComfyUI; if that does not help, without that pack"
    elif pack in failed:
        by, why = f"the node pack {pack}", f"the workers could not import that pack ({failed[pack]})"
        remedy = "Disable it"
    else:
        by, why = f"the node pack {pack}", "it does not do so when the workers import it"
        remedy = "Disable that pack, have the model loaded again without the node that does so, or restart ComfyUI if files changed"
    return UnsupportedError(f"{by} replaced {shown}, and {why}. {remedy}, or {ON_ONE_DEVICE}.")


def _pack_in(name: str) -> str:
    """Return the pack whose constant has this name; "" for another one."""
    return name.removeprefix(PACKS).partition(":")[0].partition(".")[0] if name.startswith(PACKS) else ""


def check_network(network: nn.Module) -> None:
    """Refuse a network of a patch that has changed since the ranks got it, at the first call of this function."""
    written = write(network, Settings(later=False))
    now = written.data, tuple(map(sample, written.tensors))
    if _first.setdefault(network, now) != now:
        raise UnsupportedError("a node changed a model patch after its first use. Load the model patch again.")
