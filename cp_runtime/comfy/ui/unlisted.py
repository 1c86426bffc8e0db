"""Patches of other nodes that no table lists: the ranks run them, and their first call says whether that may be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...families import splits_tokens
from ..shared.assigned import assigned, names_in
from ..shared.fingerprint import PLAIN, content_of, fields_of
from ..shared.origin import in_library
from .pack_nodes import made_by
from .watching import is_foreign

REMEDY = "Remove that node, or set on_unsupported of CP Config to 'single device'."
EXACT, ROUNDED = 1e-3, 5e-2
"""Bounds of the difference from one device, in standard deviations, where a model computes in float32 and in fewer bits: those of
`diffusers.agreement`."""


@dataclass(frozen=True)
class UnlistedPatches:
    """The patches of a call that no table lists.

    Args:
        patches: functions and objects.
        patcher: of the model.
    """

    patches: tuple[Any, ...]
    patcher: Any

    @property
    def on_all_tokens(self) -> tuple[str, ...]:
        """See `controller.calls.Unlisted`."""
        return self._makers if splits_tokens(self.patcher.model.diffusion_model) else ()

    @cached_property
    def _makers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(made_by, self.patches)))

    def __str__(self) -> str:
        return f"{self._by} patched the transformer in a way that no table lists"

    def check_devices(self, names: Sequence[str]) -> None:
        """See `controller.calls.Unlisted`."""
        if len(set(names)) > 1 and splits_tokens(self.patcher.model.diffusion_model):
            raise UnsupportedError(
                f"{self._by} patched the transformer, and has to compute the same on all workers, which different devices "
                f"({', '.join(sorted(set(names)))}) do not. {REMEDY}"
            )

    def failed(self, error: str) -> UnsupportedError:
        """Build the refusal of patches that have raised something on the ranks."""
        return UnsupportedError(f"{self._by} patched the transformer, and that fails on the workers: {error}. {REMEDY}")

    @property
    def _by(self) -> str:
        return " and ".join(self._makers)

    def check(self, difference: float | None, changed: bool, noted: Set[str]) -> None:
        """See `controller.calls.Unlisted`."""
        by = self._by
        here = list(_run_here(self.patcher))
        if noted & _names(here) or (changed and not _state(self.patches, changing=True).isdisjoint(_state(here))):
            raise UnsupportedError(
                f"{by} patched the transformer and notes something there that other code of the graph reads in ComfyUI's process, "
                f"where the transformer does not run. {REMEDY}"
            )
        bound = EXACT if self.patcher.model.get_dtype_inference() == torch.float32 else ROUNDED
        if difference is not None and not difference <= bound:
            raise UnsupportedError(
                f"{by} patched the transformer, and the ranks compute something else with that than one device: off by "
                f"{difference:.2g} standard deviations, and rounding explains {bound:g}. {REMEDY}"
            )


def _run_here(patcher: Any) -> Iterator[Any]:
    """Yield the code of other nodes that this process runs around calls of the transformer."""
    options = dict(patcher.model_options)
    within = dict(options.pop("transformer_options", {}))
    within.pop("patches", None)
    within.pop("patches_replace", None)
    yield from (options, within, patcher.callbacks, patcher.wrappers)


def _state(roots: Iterable[Any], changing: bool = False) -> set[int]:
    """Return the ids of what code may change: containers, objects, globals of node packs, and variables around functions."""
    found = _reached(roots, changing)
    return {id(value) for value in found if not isinstance(value, (FunctionType, MethodType, tuple, frozenset))}


def _names(roots: Iterable[Any]) -> set[str]:
    """Return the names that code uses, also those in texts, for `getattr`."""
    bodies = [value.__code__ for value in _reached(roots) if isinstance(value, FunctionType)]
    return {name for body in bodies for name in (*names_in(body), *_texts(body))}


def _texts(body: CodeType) -> Iterator[str]:
    for constant in body.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _reached(roots: Iterable[Any], changing: bool = False) -> list[Any]:
    """Return what functions and objects reach. `changing`: of the variables around functions, those that these assign, as cells."""
    found: dict[int, Any] = {}
    left = list(roots)
    while left:
        value = left.pop()
        if id(value) not in found and not _is_left_out(value):
            found[id(value)] = value
            left += _parts(value, changing)
    return list(found.values())


def _is_left_out(value: Any) -> bool:
    """Return whether a value has nothing that code notes: plain data, modules of a model, objects of libraries."""
    if isinstance(value, (*PLAIN, type, ModuleType, Tensor, nn.Module, ModelPatcher)):
        return True
    return not isinstance(value, _FOLLOWED) and in_library(str(type(value).__module__))


_FOLLOWED = (dict, list, tuple, set, frozenset, FunctionType, MethodType, CellType)


def _parts(value: Any, changing: bool) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, CellType):
        return [content_of(value)]
    if not isinstance(value, FunctionType):
        return list(fields_of(value).values())
    around = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    changes = assigned(value.__code__, "STORE_DEREF")
    cells = [content_of(cell) if changing and name not in changes else cell for name, cell in around]
    names = names_in(value.__code__) if is_foreign(value) else ()
    named = [value.__globals__[name] for name in names if name in value.__globals__]
    own = [each for each in named if not isinstance(each, FunctionType) or is_foreign(each)]
    return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values(), *own]
