"""Tensors that patches have noted on the ranks, in ComfyUI's process: they come here when code looks into them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...compat import versions
from ...controller.calls import Keeper
from ..shared.noted import sample


class Held(Tensor):
    """A tensor on the ranks: the first operation here fetches it.

    Args:
        number: of the tensor there.
        keeper: the ranks.
    """

    number: int
    keeper: Keeper
    _here: tuple[Tensor, object] | None  # and what it was when it came

    @staticmethod
    def __new__(
        cls, number: int, keeper: Keeper, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], device: torch.device
    ) -> Held:
        made: Held = Tensor._make_wrapper_subclass(cls, tuple(shape), tuple(strides), dtype=dtype, device=device)
        made.number, made.keeper, made._here = number, keeper, None
        weakref.finalize(made, keeper.drop, number).atexit = False
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.here())

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given, named = tree_map_only(Held, Held.here, (tuple(args), dict(kwargs or {})))
        out = function(*given, **named)
        return next((mine for mine, its in zip(args, given, strict=True) if isinstance(mine, Held) and out is its), out)

    def here(self) -> Tensor:
        """Return it as an ordinary tensor, always the same one."""
        if self._here is None:
            fetched = self.keeper.fetch(self.number, self.device)
            # Of an expanded one what there is of it.
            once = fetched[tuple(slice(None) if stride else slice(1) for stride in self.stride())]
            value = torch.empty_strided(once.shape, self.stride(), dtype=self.dtype, device=self.device).copy_(once)
            value = value.expand(self.shape)
            self._here = value, _state(value)
        return self._here[0]

    @property
    def is_here(self) -> bool:
        """Whether the ranks do not have it so any more: code here has changed it in place, or they have ended."""
        if self._here is None:
            return False
        return not self.keeper.alive or _state(self._here[0]) != self._here[1]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.here(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.here().__reduce_ex__(protocol)

    def numpy(self, **settings: Any) -> Any:
        return self.here().numpy(**settings)

    def tolist(self) -> Any:
        return self.here().tolist()

    def __array__(self, *args: Any, **settings: Any) -> Any:
        return self.here().__array__(*args, **settings)


def _state(tensor: Tensor) -> object:
    return versions([tensor]), sample(tensor)


def is_gone(tensor: Tensor) -> bool:
    """Return whether a tensor was on ranks that have ended."""
    return isinstance(tensor, Held) and not tensor.keeper.alive


_HELD: weakref.WeakValueDictionary[tuple[Keeper, int], Held] = weakref.WeakValueDictionary()


def held_by(keeper: Keeper, own: torch.device) -> Callable[..., Held]:
    """Return what makes a tensor for `shared.noted.apply`: the same one for the same number. `own`: the model's device here."""

    def held(number: int, dtype: str, shape: Sequence[int], strides: Sequence[int], on_host: bool) -> Held:
        device = torch.device("cpu") if on_host else own
        made = _HELD.get((keeper, number))
        if made is None:
            made = Held(number, keeper, getattr(torch, dtype), shape, strides, device)
        _HELD[keeper, number] = made
        return made

    return held
