"""Which tokens a tensor holds, followed through the forward from where the plan splits them.

A table names no order of streams, and no cross-attention. The forward shows both: what the plan splits is marked, and what is
computed from a marked tensor is marked too. So queries and keys say in the end which streams they are made of, in which order they
were put together, and whether there are tokens among them that every rank holds whole.

A mark lists what stands along the dimension of tokens, `(stream, tokens)` in order, None for tokens that are whole on every rank.
An empty mark says that a tensor comes from split tokens, and that its own cannot be told any more. No mark says that nothing
split is in it, or that it was made where no function of torch can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..nested import tensors

Mark = tuple[tuple[str | None, int], ...]

LOST: Mark = ()
_ATTRIBUTE = "_context_parallel_tokens"
_JOIN = {torch.cat, torch.concat, torch.concatenate}
_CUT = {
    Tensor.__getitem__, Tensor.narrow, torch.narrow, Tensor.split, torch.split, Tensor.chunk, torch.chunk,
    Tensor.split_with_sizes, torch.split_with_sizes, Tensor.tensor_split, torch.tensor_split,
}  # fmt: skip
_PRODUCTS = {
    torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__, torch.baddbmm, torch.einsum,
}  # fmt: skip
# What takes dtype, device or shape of a tensor, and none of its numbers.
_LIKE = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
_EMPTY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
_RESULTS = {Tensor, nn.Parameter, tuple, list, type(None)}
_calls = count()


class Provenance:
    """Marks of one call.

    Attributes:
        refused: what was found wrong. It is for the ranks to raise together: where a share happens to be as long as something else,
            one of them sees what the others do not.
    """

    def __init__(self) -> None:
        self.refused: PlanError | None = None
        self._call = next(_calls)  # a tensor may outlive the call; its mark does not

    def of(self, value: object) -> Mark | None:
        """The mark of a tensor, None where it has none."""
        known = getattr(value, _ATTRIBUTE, None)
        return known[1] if known is not None and known[0] == self._call else None

    def mark(self, value: Any, mark: Mark | None) -> None:
        """Say what tensors hold, also those in a tuple or list."""
        for tensor in tensors(value):
            setattr(tensor, _ATTRIBUTE, None if mark is None else (self._call, mark))

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Mark what a function of torch returned, and note where it brings split tokens together out of reach."""
        if type(out) not in _RESULTS:
            return
        found: list[Mark] = []
        for value in args:
            self._collect(value, found)
        for value in kwargs.values():
            self._collect(value, found)
        if not found or func in _EMPTY or (func in _LIKE and self.of(args[0]) is None):
            return
        if func is Tensor.__setitem__:
            self._written(args[0], found)
            return
        joined = self._joined(*args, **kwargs) if func in _JOIN else None
        if func in _PRODUCTS:
            self._check_product(func, list(tensors(args)))
        for tensor in (out,) if isinstance(out, Tensor) else tensors(out):
            held = joined or (self._cut(args[0], tensor) if func in _CUT else None)
            if held is None:
                shape = tensor.shape
                held = next((mark for mark in found if mark and _total(mark) in shape), LOST)
            setattr(tensor, _ATTRIBUTE, (self._call, held))

    def _collect(self, value: object, found: list[Mark]) -> None:
        """Add the marks of a tensor, or of those in a tuple or list. Every function of torch comes by here."""
        if isinstance(value, Tensor):
            known = getattr(value, _ATTRIBUTE, None)
            if known is not None and known[0] == self._call:
                found.append(known[1])
        elif type(value) is list or type(value) is tuple:
            for item in value:
                self._collect(item, found)

    def _written(self, target: Tensor, found: list[Mark]) -> None:
        """A tensor that was filled, such as channel by channel, holds what was written, if that is the same each time."""
        same = found[0] if found[0] and _total(found[0]) in target.shape and len(set(found)) == 1 else LOST
        self.mark(target, same)

    def _joined(self, parts: Any, dim: int = 0, **_: Any) -> Mark | None:
        """What tensors hold that are put one behind the other along their tokens; None where that is another dimension."""
        first = parts[0]
        dim %= max(first.ndim, 1)
        if (first.ndim > 1 and dim == first.ndim - 1) or (first.ndim > 2 and dim == 0):  # channels, batch
            return None
        pieces: list[tuple[str | None, int]] = []
        for tensor in parts:
            mark = self.of(tensor)
            if mark is not None and _total(mark) != tensor.shape[dim]:
                return None
            pieces += ((None, tensor.shape[dim]),) if mark is None else mark
        names = [name for name, _ in pieces if name is not None]
        return tuple(pieces) if len(names) == len(set(names)) else None

    def _cut(self, whole: Tensor, part: Tensor) -> Mark | None:
        """What a view holds that has some of a tensor's tokens; None where it has all of them."""
        mark = self.of(whole)
        if not mark or part.ndim != whole.ndim or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return None
        changed = [dim for dim, size in enumerate(part.shape) if size != whole.shape[dim]]
        if len(changed) != 1 or whole.shape[changed[0]] != _total(mark) or part.stride() != whole.stride():
            return None
        (dim,) = changed
        start = (part.storage_offset() - whole.storage_offset()) // max(whole.stride(dim), 1)
        at, held = 0, []
        for piece in mark:
            if start <= at and at + piece[1] <= start + part.shape[dim]:
                held.append(piece)
            at += piece[1]
        return tuple(held) if _total(tuple(held)) == part.shape[dim] else None

    def _check_product(self, func: Callable[..., Any], factors: list[Tensor]) -> None:
        *_, left, right = factors
        a, b = self.of(left), self.of(right)
        if not a or not b or left.ndim < 2 or right.ndim < 2:
            return
        of_pairs = left.shape[-2] == _total(a) and right.shape[-1] == _total(b)
        over_tokens = left.shape[-1] == _total(a) and right.shape[-2] == _total(b)
        if (of_pairs or over_tokens) and self.refused is None:
            self.refused = PlanError(
                f"{getattr(func, '__name__', 'a product')} of {tuple(left.shape)} and {tuple(right.shape)}: a matrix product "
                "brings tokens together that are split over the ranks, out of reach. Attend by torch's "
                "scaled_dot_product_attention, or split behind this module."
            )


def _total(mark: Mark) -> int:
    return mark[0][1] if len(mark) == 1 else sum([tokens for _, tokens in mark])
