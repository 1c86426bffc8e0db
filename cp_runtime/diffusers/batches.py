"""The batch axis of the Python API: groups of ranks compute items of a batch, such as the halves of CFG, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..engine.mesh import BatchMesh
from ..engine.plan import ModulePlan
from ..engine.sharding import BatchShares
from ..errors import PlanError
from ..nested import rebuild, tensors

# In diffusers: noise levels that tokens refer to by index, and one number per layer.
FOR_ALL_ITEMS = {
    "MiniMaxH3Transformer3DModel": frozenset({
        "timestep", "timestep_indices", "token_tags", "position_ids", "text_indices", "audio_indices", "video_indices",
    }),
    "WanVACETransformer3DModel": frozenset({"control_hidden_states_scale"}),
}  # fmt: skip


class Share:
    """The part of a call that this rank's group computes.

    Args:
        mesh: all ranks.
        shares: how the groups share the items.
    """

    def __init__(self, mesh: BatchMesh, shares: BatchShares) -> None:
        self._mesh, self._shares = mesh, shares
        self.sequence = mesh.sequence(shares.groups)
        self._span = shares.held(mesh.index(shares.groups))

    @classmethod
    def of(cls, mesh: BatchMesh, groups: int, args: Any, kwargs: Mapping[str, Any]) -> Share | None:
        """Return this rank's share, or None if there are fewer items than groups: then all ranks share the sequence.

        Items are counted along dimension 0 of the first argument that is a tensor of three or more dimensions.
        """
        items = next((tensor.shape[0] for tensor in tensors([args, dict(kwargs)]) if tensor.ndim >= 3), 0)
        return cls(mesh, BatchShares(groups, items, 1, frozenset(), mesh.group_shares(groups))) if items >= groups > 1 else None

    def take_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], whole: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return this group's part of the arguments of a call.

        Args:
            names: names of the positional ones.
            whole: those that every group gets unchanged, see `for_all_items`.
        """
        positional = [value if name in whole else self.take(value) for name, value in zip(names, args, strict=False)]
        return (
            (*positional, *map(self.take, args[len(positional) :])),
            {name: value if name in whole else self.take(value) for name, value in kwargs.items()},
        )

    def take(self, value: Any) -> Any:
        """Return this group's part of an argument: of tensors with as many rows as items, and of lists with one entry per item."""
        start, stop = self._span
        if isinstance(value, Tensor):
            return value[start:stop] if value.ndim and value.shape[0] == self._shares.items else value
        if isinstance(value, (list, tuple)):
            if isinstance(value, list) and len(value) == self._shares.items and not list(tensors(value)):
                return value[start:stop]
            return rebuild(value, [self.take(item) for item in value])
        if isinstance(value, dict):
            return {key: self.take(item) for key, item in value.items()}
        return value

    def gather(self, out: Any) -> Any:
        """Return an output of the module with the items of all groups.

        Raises:
            PlanError: a tensor in it does not have one row per item of this group.
        """
        return map_outputs(out, self._gathered)

    def _gathered(self, out: Any) -> Any:
        start, stop = self._span
        for tensor in tensors(out):
            if not tensor.ndim or tensor.shape[0] != stop - start:
                raise PlanError(
                    f"batch_degree: an output of shape {tuple(tensor.shape)}, for {stop - start} items of the batch, cannot be put "
                    "together by items. Set batch_degree=1."
                )
        return self._shares.gather(out, self._mesh)


def map_outputs(out: Any, function: Callable[[Any], Any]) -> Any:
    """Return an output of a module of diffusers, with what the function makes of it, or of each field of an output class."""
    if isinstance(out, dict) and type(out) is not dict:
        return type(out)(**{key: map_outputs(item, function) for key, item in out.items()})
    return function(out)


def for_all_items(module: nn.Module, plan: ModulePlan | None) -> frozenset[str]:
    """Return the arguments whose rows are never items, however many there are: token positions, and known exceptions."""
    inputs = plan.inputs if plan is not None else {}
    tokens = {name for name, split in inputs.items() if getattr(split, "split_dim", None) == 0}
    return FOR_ALL_ITEMS.get(type(module).__name__, frozenset()) | tokens
