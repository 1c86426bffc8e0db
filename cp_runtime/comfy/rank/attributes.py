"""Attributes of a model's modules on which patches of other nodes note something for the next call.

ComfyUI's process runs no patches, so there they are as at the beginning. Every sampling run begins like that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..shared.assigned import set_later
from ..shared.modules import BOOKKEEPING
from ..shared.objects import STANDARD, is_ours

_FORWARD = "forward"  # replaced for the time of a call


class Attributes:
    """The attributes of all modules of a model, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(module, _attributes(module)) for module in model.modules()]

    def changed(self) -> frozenset[str]:
        """Return the names of those that are there now and were not, or the other way around, or are others."""
        names: set[str] = set()
        for module, before in self._held:
            now = _attributes(module)
            names |= {name for name in before.keys() | now.keys() if before.get(name, names) is not now.get(name, names)}
        return frozenset(names)

    def restore(self) -> None:
        for module, before in self._held:
            for name in _attributes(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)


def _attributes(module: nn.Module) -> dict[str, Any]:
    cls: Any = type(module)
    later = set_later(cls)
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in STANDARD or name in later or name == _FORWARD or BOOKKEEPING.fullmatch(name) or is_ours(value))
    }


class RunAttributes:
    """The attributes of a model's modules from run to run. Made before the first run with patches that no table lists."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._clean, self._run = model, Attributes(model), ""

    @contextmanager
    def of_run(self, run: str, for_comparison: bool) -> Iterator[Attributes]:
        """Have the attributes be as the run has left them, while active; yield those before its first call.

        Args:
            run: names the run.
            for_comparison: have them as before the first call; nothing of this call remains.
        """
        now = Attributes(self._model) if for_comparison else None
        if for_comparison or self._run != run:
            self._clean.restore()
        if not for_comparison:
            self._run = run
        try:
            yield self._clean
        finally:
            if now is not None:
                now.restore()
