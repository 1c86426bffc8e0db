"""Tensors that patches have noted on the ranks, in ComfyUI's process: they come here when code looks into them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...controller.calls import Keeper


class Held(Tensor):
    """A tensor on the ranks: an operation here fetches it.

    Args:
        number: of the tensor there.
        keeper: the ranks.
    """

    number: int
    keeper: Keeper

    @staticmethod
    def __new__(cls, number: int, keeper: Keeper, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> Held:
        made: Held = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.number, made.keeper = number, keeper
        weakref.finalize(made, keeper.drop, number).atexit = False
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Held({self.number}, {self.dtype}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        places = zip(args, function._schema.arguments, strict=False)
        if any(isinstance(each, Held) and place.alias_info is not None and place.alias_info.is_write for each, place in places):
            raise RuntimeError("a node changes a tensor in place that patches noted on the workers; it has to work on a copy")
        args, kwargs = tree_map_only(Held, Held.fetch, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)

    def fetch(self) -> Tensor:
        return self.keeper.fetch(self.number, self.device)


def is_gone(tensor: Tensor) -> bool:
    """Return whether a tensor was on ranks that have ended."""
    return isinstance(tensor, Held) and not tensor.keeper.alive


_HELD: weakref.WeakValueDictionary[tuple[Keeper, int], Held] = weakref.WeakValueDictionary()


def held_by(keeper: Keeper, own: torch.device) -> Callable[[int, str, Sequence[int], bool], Held]:
    """Return what makes a tensor for `shared.noted.apply`: the same one for the same number. `own`: the model's device here."""

    def held(number: int, dtype: str, shape: Sequence[int], on_host: bool) -> Held:
        device = torch.device("cpu") if on_host else own
        made = _HELD.get((keeper, number))
        if made is None:
            made = Held(number, keeper, getattr(torch, dtype), shape, device)
        _HELD[keeper, number] = made
        return made

    return held
