"""Patches of other nodes that no table lists: the ranks run them, and calls that are repeated say whether that may be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

import torch

from ...controller.calls import Keeper
from ...errors import MirrorError, UnsupportedError
from ...families import splits_tokens
from ...pool.messages import CallOutcome
from ..shared.assigned import names_in
from ..shared.reached import functions_of_packs
from .noted import NotedHere, remedy
from .pack_nodes import made_by

COMPARED_AT_FIRST = 2  # calls of a run: none before has been wrong
REMEDY_LATE = "Remove that node or Apply Context Parallel."
ONLY_HERE = frozenset({"uuids", "wrappers", "callbacks"})  # of transformer_options, see `options.UI_ONLY`
EXACT, ROUNDED = 1e-3, 5e-2
"""Bounds of the difference from one device, in standard deviations, where a model computes in float32 and in fewer bits: those of
`diffusers.agreement`."""


class NeedsWholeBatch(UnsupportedError):
    """Patches of a UNet need all of the batch: they note something for later calls, or mix its halves."""


@dataclass(frozen=True)
class UnlistedPatches:
    """The patches of a call that no table lists.

    Args:
        patches: functions and objects.
        patcher: of the model.
        noted: what they have noted before the call; None outside of calls.
        whole_batch: every rank computes all of it.
        calls: of a run with them so far, this one included.
        watched: code of other nodes is around the call, and may look into its options behind it.
    """

    patches: tuple[Any, ...]
    patcher: Any
    noted: NotedHere | None
    whole_batch: bool
    calls: int
    watched: bool = False

    @property
    def on_all_tokens(self) -> tuple[str, ...]:
        """See `controller.calls.Unlisted`."""
        return self._makers if splits_tokens(self.patcher.model.diffusion_model) else ()

    @property
    def on_whole_batch(self) -> tuple[str, ...]:
        """See `controller.calls.Unlisted`."""
        return self._makers if self.whole_batch else ()

    @cached_property
    def _makers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(made_by, self.patches)))

    @property
    def may_need_whole_batch(self) -> bool:
        """Whether ranks have had a part of the batch each, of a model that splits nothing else."""
        return not self.whole_batch and not splits_tokens(self.patcher.model.diffusion_model)

    @property
    def _by(self) -> str:
        return " and ".join(self._makers)

    @property
    def _remedy(self) -> str:
        return remedy(self.patcher.model.diffusion_model)

    def __str__(self) -> str:
        return f"{self._by} patched the transformer in a way that no table lists"

    def check_code(self) -> None:
        """Raise UnsupportedError where code reads options that only ComfyUI's process has."""
        functions = functions_of_packs(self.patches)
        if read := {text for function in functions for text in _texts(function.__code__)} & ONLY_HERE:
            raise UnsupportedError(
                f"{self._by} patched the transformer and reads {', '.join(sorted(read))} of transformer_options, which only "
                f"ComfyUI's process has. {self._remedy}"
            )

    def check_devices(self, names: Sequence[str]) -> None:
        """See `controller.calls.Unlisted`."""
        if len(set(names)) > 1 and splits_tokens(self.patcher.model.diffusion_model):
            raise UnsupportedError(
                f"{self._by} patched the transformer, and has to compute the same on all workers, which different devices "
                f"({', '.join(sorted(set(names)))}) do not. {self._remedy}"
            )

    def failed(self, error: str) -> UnsupportedError:
        """Build the refusal of patches that have raised something on the ranks, or have not had all of the batch."""
        if self.may_need_whole_batch:
            return NeedsWholeBatch()
        return UnsupportedError(f"{self._by} patched the transformer, and that fails on the workers: {error}. {self._remedy}")

    def check(self, difference: float | None, outcomes: Sequence[CallOutcome], keeper: Keeper) -> None:
        """See `controller.calls.Unlisted`."""
        bound = EXACT if self.patcher.model.get_dtype_inference() == torch.float32 else ROUNDED
        if difference is not None and not difference <= bound:
            if self.may_need_whole_batch and self.calls <= COMPARED_AT_FIRST:
                raise NeedsWholeBatch
            what = (
                f"{self._by} patched the transformer, and the ranks compute something else with that than one device: off by "
                f"{difference:.2g} standard deviations, and rounding explains {bound:g}"
            )
            if self.calls > COMPARED_AT_FIRST:
                raise MirrorError(f"{what}. Earlier steps, which were not compared, may be wrong too. {REMEDY_LATE}")
            raise UnsupportedError(f"{what}. {self._remedy}")
        self._take_notes(outcomes, keeper)  # one device would compute the call once more, with what was noted before it

    def _take_notes(self, outcomes: Sequence[CallOutcome], keeper: Keeper) -> None:
        """Note here what the ranks have noted. Raise UnsupportedError if they have noted different things, or some that cannot be
        said; NeedsWholeBatch first, where that may help."""
        at_work = [outcome for outcome in outcomes if not outcome.idle]
        if self.watched and (wrote := next(filter(None, (outcome.wrote for outcome in at_work)), ())):
            raise UnsupportedError(
                f"{self._by} patched the transformer and writes {', '.join(wrote)} into transformer_options on the workers, where "
                f"code of another node may look for it in ComfyUI's process. {self._remedy}"
            )
        noted, unsaid = {outcome.noted for outcome in at_work}, next(filter(None, (outcome.unsaid for outcome in at_work)), "")
        if (unsaid or any(noted)) and len(at_work) > 1 and self.may_need_whole_batch:
            raise NeedsWholeBatch
        if not unsaid and len(noted) > 1:
            unsaid = "not all workers note the same"
        try:
            if not unsaid and any(noted) and self.noted is not None:
                self.noted.take(noted.pop(), keeper)
        except MirrorError as error:
            unsaid = str(error)
        if unsaid:
            raise UnsupportedError(
                f"{self._by} patched the transformer and notes something for later calls: {unsaid}. {self._remedy}"
            )


def _texts(body: CodeType) -> Iterator[str]:
    """Yield the names and texts in a function."""
    yield from names_in(body)
    for constant in body.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)
