"""What this process computes with, against what the ranks compute with: the code, and what a network's modules hold. See
`shared.fingerprint` and `shared.state`.

Ranks import ComfyUI afresh, and the node packs whose code is found here, as ComfyUI has imported them. What differs then is
refused: a pack or a node has replaced it since, or in a way that an import does not repeat.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from comfy.lora import calculate_weight
from torch import nn

from ...controller.calls import Code as PatchCode
from ...errors import UnsupportedError
from ...pool.messages import Described, Loaded
from ..shared.fingerprint import Code, classes_of, code_of, differing, digest_of, found
from ..shared.modules import full_name
from ..shared.patches import ADAPTERS
from ..shared.state import OF_DEVICE, State, change_in, state_of, without_later
from ..shared.weights import PREFIX, differing_weight, network_of, sample_weights
from .notes import Asking, notes_of
from .packs import in_order, is_comfy, pack_of, packs_naming, packs_of

OF_MODEL = (
    "Remove that node, then have the model loaded again: Edit, Unload Models and Execution Cache, or restart ComfyUI. Or set "
    "on_unsupported of CP Config to 'single device'."
)
"""What a node changes in a model stays there without the node."""
_codes: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Code]] = WeakKeyDictionary()
_naming: set[str] = set()
"""Packs that have changed constants: see `_packs_behind`."""
_of_patches: dict[tuple[tuple[str, ...], str], tuple[Code, PatchCode]] = {}
_confirmed: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], Code]] = WeakKeyDictionary()
_first: WeakKeyDictionary[nn.Module, tuple[State, Mapping[str, str]]] = WeakKeyDictionary()


def code_behind(model: Any, roots: tuple[str, ...] = ()) -> Code:
    """Return the code of a model or a VAE as it was loaded, and of classes and functions by name; what is known of it while that
    holds."""
    note_state(model)
    known = _codes.setdefault(network_of(model), {})
    ours = known.get(roots)
    if ours is None or not ours.holds():
        ours = known[roots] = code_of(notes_of(model).classes, {name: found(name) for name in roots})
    return ours


def code_of_patches(patches: Mapping[str, Any], only: str = "") -> PatchCode | None:
    """Return the code of a call's patches, classes and functions by name, to compare with the ranks'; None without any. `only`: the
    node pack whose code alone counts."""
    if not patches:
        return None
    names = tuple(sorted(patches))
    known = _of_patches.get((names, only))
    if known is None or not known[0].holds():
        ours = code_of(roots=patches)
        packs, compare = in_order(packs_of(ours.files.values())), partial(_compare_patches, ours, only)
        known = ours, PatchCode(roots=names, packs=packs, digest=digest_of(ours.hashes), compare=compare)
        _of_patches[names, only] = known
    return known[1]


def note_state(model: Any) -> State:
    """Return what the network of a `BaseModel` or a VAE held at the first call of this function, which follows its load."""
    notes = notes_of(model)
    if notes.state is None:
        notes.classes, notes.state = classes_of(network_of(model)), state_of(model)
    return notes.state


def check_state(patcher: Any) -> None:
    """Refuse a ModelPatcher's model or VAE whose modules a node has changed since it was loaded. What ComfyUI has patched and will
    restore does not count."""
    model = patcher.model
    network, before = network_of(model), note_state(model)
    backups = (patcher.object_patches_backup, patcher.backup, patcher.hook_backup, getattr(patcher, "backup_buffers", ()))
    patched = {name.removeprefix(PREFIX) for backup in backups for name in backup}
    change = change_in(without_later(network, before), without_later(network, state_of(model)), patched)
    if change:
        raise UnsupportedError(f"a node changed {change}, and the workers load it from its file. {OF_MODEL}")


def check_code(model: Any) -> None:
    """Refuse a model with other code than at its load onto the ranks. It takes some 50 µs while nothing has changed."""
    network = network_of(model)
    confirmed = _confirmed.get(network)
    if confirmed is None or confirmed[1].holds():
        return
    roots, before = confirmed
    now = code_behind(model, roots)
    if now.hashes == before.hashes:
        _confirmed[network] = roots, now
    else:
        raise _replaced(now, before.hashes, {})


@dataclass(frozen=True)
class ModelFingerprint:
    """A `target.Fingerprint` of a ModelPatcher's model or VAE."""

    patcher: Any

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the names of the code that makes weights of the patcher's weight patches."""
        patches = self.patcher.patches
        adapters = {type(entry[1]) for entries in patches.values() for entry in entries}
        known = map(full_name, adapters & set(ADAPTERS.values()))
        return tuple(sorted({full_name(calculate_weight), *known})) if patches else ()

    @property
    def loader(self) -> PatchCode | None:
        """Return the code of a node pack's function by which the model was loaded, and ranks load it. What it uses of
        ComfyUI does not count: what a network computes with is compared after the load."""
        init = self.patcher.cached_patcher_init
        function = inspect.unwrap(init[0]) if init is not None else None  # this pack's recorder wraps ComfyUI's
        pack = pack_of(function.__code__.co_filename) if isinstance(function, FunctionType) else ""
        return code_of_patches({full_name(function): function}, only=pack) if pack else None

    @property
    def packs(self) -> tuple[str, ...]:
        return in_order({*packs_of(code_behind(self.patcher.model, self.roots).files.values()), *_naming})

    def compare(self, replies: Sequence[Loaded], same_computer: bool, ask: Asking) -> None:
        model, roots = self.patcher.model, self.roots
        network, state = network_of(model), note_state(model)
        ours = code_behind(model, roots)
        own = digest_of(ours.hashes), digest_of(state.held), digest_of(state.contents)
        theirs = [(reply.code, reply.state, reply.contents) for reply in replies]
        if any(own[:2] != each[:2] or (same_computer and own[2] != each[2]) for each in theirs):
            described = ask(())
            if more := _packs_behind(ours, described):
                described = ask(more)
            for each in described:
                _compare_with(each, ours, state, same_computer)
            _naming.update(more)
        _confirmed[network] = roots, ours


def _packs_behind(ours: Code, described: Sequence[Described]) -> set[str]:
    """Return packs that may have changed constants which the ranks have otherwise: no code tells whose such a change is."""
    names = {name for each in described for name in differing(ours.hashes, each.code) if not pack_of(ours.files.get(name, ""))}
    return packs_naming({name.rpartition(":")[2].rpartition(".")[2].partition("[")[0] for name in names}) if names else set()


def _compare_with(theirs: Described, ours: Code, state: State, same_computer: bool) -> None:
    if ours.hashes != theirs.code:
        raise _replaced(ours, theirs.code, theirs.failed)
    by_device = {f"{path}.{OF_DEVICE}" for path in state.held}
    change = change_in(State(theirs.held, theirs.contents if same_computer else {}), state, by_device)
    if change:
        raise UnsupportedError(f"ComfyUI's process has another {change} than the workers load from the file. {OF_MODEL}")


def _compare_patches(ours: Code, only: str, replies: Sequence[Described]) -> None:
    for reply in replies:
        names = differing(ours.hashes, reply.code)
        if any(not only or pack_of(ours.files.get(name, "")) == only for name in names):
            raise _replaced(ours, reply.code, reply.failed)


def _replaced(ours: Code, theirs: Mapping[str, str], failed: Mapping[str, str]) -> UnsupportedError:
    """Build the refusal of code that the ranks have otherwise. Of several differences it names what a pack has replaced."""
    names = differing(ours.hashes, theirs)
    files = {name: ours.files.get(name, "") for name in names}
    both = [name for name in names if name in ours.hashes and name in theirs] or names
    name = min(both, key=lambda each: (not pack_of(files[each]), bool(not files[each] or is_comfy(files[each])), each))
    shown, pack = name.replace(":", "."), pack_of(files[name])
    if not pack:
        by = "a node pack, a script or an update of ComfyUI's files"
        why, remedy = "the workers have it as ComfyUI imports it now", "Restart ComfyUI; if that does not help, without that pack"
    elif pack in failed:
        by, why = f"the node pack {pack}", f"the workers could not import that pack ({failed[pack]})"
        remedy = "Disable it"
    else:
        by, why = f"the node pack {pack}", "it does not do so when the workers import it"
        remedy = "Disable that pack, have the model loaded again without the node that does so, or restart ComfyUI if files changed"
    return UnsupportedError(f"{by} replaced {shown}, and {why}. {remedy}, or set on_unsupported of CP Config to 'single device'.")


def check_network(network: nn.Module) -> None:
    """Refuse a network of a patch that has changed since the ranks got it, at the first call of this function."""
    known = _first.get(network)
    now = state_of(network), sample_weights(network)
    if known is None:
        _first[network] = now
        return
    clean = partial(without_later, network)
    weight = differing_weight(known[1], now[1])
    change = change_in(clean(known[0]), clean(now[0])) or ("" if weight is None else f"weight {weight}")
    if change:
        raise UnsupportedError(f"a node changed {change} in a model patch after its first use. Load the model patch again.")
