"""Follow tokens through a forward, from where the plan splits them to where they attend.

A table names no order of streams, and no cross-attention. The forward shows both: what the plan splits is marked, and whatever is
computed from a marked tensor is marked too. Queries and keys then show which streams they are made of, in which order these were
joined, and whether tokens that every rank holds whole are among them.

A mark lists what lies along the token dimension as `(stream, tokens)` in order; the stream is None for tokens that are whole on
every rank. An empty mark means that a tensor was computed from split tokens, but which of them it holds is unknown. No mark means
that it holds nothing split, or was made where no function of torch could be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import PlanError
from ..nested import tensors

Mark = tuple[tuple[str | None, int], ...]

LOST: Mark = ()
_ATTRIBUTE = "_context_parallel_tokens"


def _named(names: str) -> set[Callable[..., Any]]:
    """Return torch's functions, functional ones and methods of tensors that have one of these names."""
    return {getattr(owner, name) for owner in (torch, F, torch.linalg, Tensor) for name in names.split() if hasattr(owner, name)}


_JOIN = _named("cat concat concatenate")
_CUT = {Tensor.__getitem__, *_named("narrow split chunk split_with_sizes tensor_split")}
_PRODUCTS = _named("matmul bmm __matmul__ __rmatmul__ baddbmm mm tensordot inner addmm linear")
_PAIRWISE = {*_PRODUCTS, *_named("mul __mul__ __rmul__")}
# Functions that combine or reorder tokens along a dimension -> position of the argument that names the dimension.
_ALONG = {
    **dict.fromkeys(_named("mean sum var std prod logsumexp softmax log_softmax cumsum cumprod flip"), 1),
    **dict.fromkeys(_named("norm vector_norm normalize roll"), 2),
}
_CONVOLUTIONS = _named("conv1d conv2d conv3d")
# Functions that use a tensor's dtype, device or shape, but none of its numbers.
_LIKE = _named("to type_as expand_as view_as reshape_as")
_EMPTY = _named("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor")
_OUTSIDE = _named("numpy __array__ tolist __dlpack__")
_RESULTS = {Tensor, nn.Parameter, tuple, list, type(None)}
_calls = count()


class Provenance:
    """Marks of one call.

    Attributes:
        refused: the first mistake found. The ranks raise it together, because a rank whose share happens to be as long as something
            else may see what the others do not.
        left_torch: split tokens went where no function of torch can be seen, so a tensor without a mark may hold them.
    """

    def __init__(self) -> None:
        self.refused: PlanError | None = None
        self.left_torch = False
        # Memory written through a view: other views of it hold split tokens, too. Kept, so that no address is reused.
        self._filled: dict[int, torch.UntypedStorage] = {}
        self._call = next(_calls)  # a tensor may outlive the call; its mark does not

    def of(self, value: object) -> Mark | None:
        """Return the mark of a tensor, or None."""
        known = getattr(value, _ATTRIBUTE, None)
        return known[1] if known is not None and known[0] == self._call else None

    def mark(self, value: Any, mark: Mark | None) -> None:
        """Mark tensors, also those in a tuple or list."""
        for tensor in tensors(value):
            setattr(tensor, _ATTRIBUTE, None if mark is None else (self._call, mark))
            if mark is None and tensor.layout is torch.strided:  # it was gathered into a buffer that had been filled part by part
                self._filled.pop(tensor.untyped_storage().data_ptr(), None)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Mark what a function of torch returned, and note if it combines split tokens out of reach."""
        if type(out) not in _RESULTS:
            self.left_torch |= func in _OUTSIDE and self.of(args[0]) is not None
            return
        found: list[Mark] = []
        for value in (*args, *kwargs.values()):
            self._collect(value, found)
        if not found or func in _EMPTY or (func in _LIKE and self.of(args[0]) is None):
            return
        if func is Tensor.__setitem__:
            self._written(args[0], found)
            return
        target = kwargs.get("out") if "out" in kwargs else args[0] if args and out is args[0] else None
        if isinstance(target, Tensor):
            self._fill(target)
        joined = self._joined(*args, **kwargs) if func in _JOIN else None
        if self.refused is None:
            self._check_together(func, args, kwargs, out)
        for tensor in (out,) if isinstance(out, Tensor) else tensors(out):
            held = joined or (self._cut(args[0], tensor) if func in _CUT else None)
            if held is None:
                shape = tensor.shape
                held = next((mark for mark in found if mark and _total(mark) in shape), LOST)
            whole = held and not any(name for name, _ in held)  # only whole tokens of a tensor that was partly split
            setattr(tensor, _ATTRIBUTE, None if whole else (self._call, held))

    def _collect(self, value: object, found: list[Mark]) -> None:
        """Add the marks of a tensor, or of those in a tuple or list. Every function of torch passes through here."""
        if isinstance(value, Tensor):
            known = getattr(value, _ATTRIBUTE, None)
            if known is not None and known[0] == self._call:
                found.append(known[1])
            elif self._filled and value.layout is torch.strided and value.untyped_storage().data_ptr() in self._filled:
                found.append(LOST)
        elif type(value) is list or type(value) is tuple:
            for item in value:
                self._collect(item, found)

    def _fill(self, target: Tensor) -> None:
        if self.of(target) is None and target.layout is torch.strided:
            storage = target.untyped_storage()
            self._filled[storage.data_ptr()] = storage

    def _written(self, target: Tensor, found: list[Mark]) -> None:
        """Mark a tensor that is filled, such as channel by channel, with what was written if that is the same each time."""
        self._fill(target)
        same = found[0] if found[0] and _total(found[0]) in target.shape and len(set(found)) == 1 else LOST
        self.mark(target, same)

    def _joined(self, parts: Any, dim: int = 0, **_: Any) -> Mark | None:
        """Return the mark of tensors concatenated along their tokens; None if along another dimension."""
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
        """Return the mark of a view with some of a tensor's tokens; None if it has all of them."""
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

    def _check_together(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note if a function combines split tokens, as far as shapes show it."""
        if not isinstance(out, Tensor):
            return
        marked = [(tensor, _total(mark)) for tensor in tensors([args, dict(kwargs)]) if (mark := self.of(tensor))]
        if func is torch.einsum:
            together = self._einsum(args, out)
        elif func in _PAIRWISE and len(marked) > 1:
            (left, a), (right, b) = marked[-2:]
            together = a == b and out.shape.count(a) > max(left.shape.count(a), right.shape.count(a))
        else:
            together = False
        if func in _PRODUCTS and len(marked) > 1:
            matrices = min(left.ndim, right.ndim) > 1 and func is not F.linear
            of_pairs = matrices and left.shape[-2] == a and right.shape[-1] == b
            over_tokens = matrices and left.shape[-1] == a and right.shape[-2] == b
            together |= of_pairs or over_tokens or (a not in out.shape and b not in out.shape)
        if together:
            self.refused = PlanError(
                f"{getattr(func, '__name__', 'a product')} of {' and '.join(str(tuple(tensor.shape)) for tensor, _ in marked)}: a "
                "matrix product brings tokens together that are split over the ranks, out of reach. Attend by torch's "
                "scaled_dot_product_attention, or split behind this module."
            )
        elif len(marked) == 1 and self._is_along(func, args, kwargs, *marked[0]):
            self.refused = PlanError(
                f"{getattr(func, '__name__', 'a function')} of {tuple(marked[0][0].shape)} goes over tokens that are split over "
                "the ranks: each rank would take its own alone. Split behind this module, or gather in front of it."
            )

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> bool:
        """Return whether an equation combines tokens: the operands' token dimensions share no letter that the output keeps."""
        equation, *operands = args
        operands = list(tensors(operands))
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return False
        given, result = equation.replace(" ", "").split("->")
        common: set[str] | None = None
        for letters, tensor in zip(given.split(","), operands, strict=False):
            mark = self.of(tensor)
            if mark and _total(mark) in tensor.shape:
                mine = {letter for letter, size in zip(letters, tensor.shape, strict=False) if size == _total(mark)}
                common = mine if common is None else common & mine
        return common is not None and not common & set(result)

    @staticmethod
    def _is_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor, tokens: int) -> bool:
        """Return whether a function works along the token dimension, if only one dimension can be that."""
        places = [dim for dim, size in enumerate(tensor.shape) if size == tokens]
        if len(places) != 1 or not args or args[0] is not tensor:
            return False
        if func is F.group_norm:
            return places[0] > 0
        if func in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return places[0] > 1 and weight.ndim == tensor.ndim and weight.shape[places[0]] > 1
        if func not in _ALONG:
            return False
        given = args[_ALONG[func]] if len(args) > _ALONG[func] else kwargs.get("dim", kwargs.get("dims"))
        dims = [given] if isinstance(given, int) else given if isinstance(given, (tuple, list)) else ()
        return any(dim % tensor.ndim == places[0] for dim in dims)


def _total(mark: Mark) -> int:
    return mark[0][1] if len(mark) == 1 else sum([tokens for _, tokens in mark])
