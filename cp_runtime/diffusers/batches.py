"""The items of a batch that a group of ranks computes, in the arguments and outputs of diffusers' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.ranks.mesh import BatchMesh
from ..engine.ranks.sharding import BatchShares
from ..errors import PlanError
from ..nested import form_of, rebuild, tensors
from .known import Dims


class BatchSlice:
    """The batch items of a call that this rank's group computes, such as one half of CFG.

    Args:
        mesh: all ranks.
        listed: items come and go in lists.
    """

    def __init__(self, mesh: BatchMesh, shares: BatchShares, listed: bool) -> None:
        self._mesh, self._shares, self._listed = mesh, shares, listed
        self.sequence = mesh.sequence(shares.groups)
        self._span = shares.held(mesh.index(shares.groups))

    @classmethod
    def of(cls, mesh: BatchMesh, groups: int, given: Mapping[str, Any], dims: Dims) -> BatchSlice | None:
        """Return this rank's share, or None if there are fewer items than groups: then all ranks share the sequence.

        Items are counted along dimension 0 of the first argument that is a tensor of three or more dimensions, or in a list with
        one for each. Those of several sizes are not divided: outputs of other groups would be of unknown sizes. Nor are any where a
        list without tensors has different entries: diffusers takes the first one for all items.
        """
        first = next((name for name, value in given.items() if any(tensor.ndim >= 3 for tensor in tensors(value))), "")
        found = [tensor for tensor in tensors(given.get(first)) if tensor.ndim >= 3]
        listed = dims.get(first) == 0
        items = len(given[first]) if listed else found[0].shape[0] if found else 0
        lists = [value for name, value in given.items() if isinstance(value, list) and dims.get(name) == 0]
        said = [value for value in lists if not any(True for _ in tensors(value))]
        differ = (listed and len(set(map(form_of, given[first]))) > 1) or any(each != value[0] for value in said for each in value)
        if items < groups or differ:
            return None
        return cls(mesh, BatchShares(groups, items, 1, frozenset(), mesh.group_shares(groups)), listed)

    def take_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], dims: Dims
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return this group's part of a call's arguments. `names`: of the positional ones; `dims`: see `item_dims`."""
        positional = [self.take(value, name, dims) for name, value in zip(names, args, strict=False)]
        return (
            (*positional, *(self.take(value, "", dims) for value in args[len(positional) :])),
            {name: self.take(value, name, dims) for name, value in kwargs.items()},
        )

    def take(self, value: Any, name: str, dims: Dims) -> Any:
        """Return this group's part of an argument: of tensors with as many rows as items, and of lists with an entry for each."""
        start, stop = self._span
        dim = dims.get(name, 0)
        if dim is None:
            return value
        if isinstance(value, Tensor):
            rows, rest = divmod(value.shape[dim], self._shares.items) if value.ndim > dim else (0, 0)
            if rest or (rows != 1 and not (rows and name in dims)):  # several of an item, where that is known
                return value
            return value.narrow(dim, start * rows, (stop - start) * rows)
        if isinstance(value, (list, tuple)):
            if name in dims and dim == 0 and len(value) == self._shares.items:
                return value[start:stop]
            return rebuild(value, [self.take(item, "", dims) for item in value])
        if isinstance(value, dict):
            return {key: self.take(item, "", dims) for key, item in value.items()}
        return value

    def gather(self, out: Any) -> Any:
        """Gather an output's items from all groups. Raises PlanError unless its tensors have one row per item of this group."""
        return map_outputs(out, self._gathered)

    def _gathered(self, out: Any) -> Any:
        start, stop = self._span
        if self._listed and isinstance(out, tuple):
            return rebuild(out, [self._gathered(each) for each in out])
        if self._listed and isinstance(out, list):
            return list(self._gathered(torch.stack(out)))
        for tensor in tensors(out):
            if not tensor.ndim or tensor.shape[0] != stop - start:
                raise PlanError(
                    f"batch_degree: an output of shape {tuple(tensor.shape)}, for {stop - start} items of the batch, cannot be put "
                    "together by items. Set batch_degree=1."
                )
        return self._mesh.gather(self._shares, out)


def map_outputs(out: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to an output of a diffusers module, or to each field of an output class."""
    if isinstance(out, dict) and type(out) is not dict:
        return type(out)(**{key: map_outputs(item, function) for key, item in out.items()})
    return function(out)
