"""Models of which every rank keeps 1/N: the weights' side of `apply_context_parallel(shard_weights=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import before_apply
from ..engine.mesh import SequenceMesh
from ..engine.weights.sharded import ShardedWeights
from ..errors import PlanError
from .agreement import device_of

REMEDY = "Call remove_context_parallel on all ranks, do this with whole weights, and call apply_context_parallel again."


class SharedModel:
    """A model whose blocks are shared out over the ranks of a mesh.

    All ranks make it alike. Everything outside of the blocks is whole on every rank.

    Args:
        model: model with the same weights on every rank.
        device: where this rank computes; None = where the weights are.

    Raises:
        PlanError: the model has no blocks, or weights that cannot be shared out. Nothing is changed then. After another error,
            such as of a device without memory, blocks have lost their weights: `load_state_dict(..., assign=True)` brings them.
    """

    def __init__(self, model: nn.Module, mesh: SequenceMesh, device: torch.device | str | None) -> None:
        _check(model)
        self._model = model
        self._home = device_of(list(model.parameters()))
        place = self._home if device is None else torch.empty(0, device=device).device  # with its index
        # All models of a mesh share a group: the two transformers of a pipeline, for example, run one after the other.
        self.weights = ShardedWeights(model, mesh.weights, place, remedy=REMEDY)
        if not self.weights.blocks:
            self.weights.remove()
            raise PlanError(
                f"shard_weights: {type(model).__name__} has no blocks: no list of modules with weights of their own. "
                "Apply with shard_weights=False."
            )
        # These refuse before anything outside of the blocks is changed.
        self._allow = [
            model.register_load_state_dict_pre_hook(_refuse_to_load).remove,
            before_apply(model, self._try_on_blocks),
        ]
        try:
            for name in self.weights.blocks:  # one at a time, so that at most one whole block exists beside the shards
                self.weights.keep(name)
            self._move(place)
        except BaseException:
            self._allow_changes()
            self.weights.remove()
            raise

    def give_back(self) -> None:
        """Make all weights whole again, where they were. All ranks must call it."""
        self._allow_changes()
        self.weights.restore(self._home)
        self._move(self._home)

    def _allow_changes(self) -> None:
        for allow in self._allow:
            allow()

    def _try_on_blocks(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the absent weights, which refuse to be changed; a function that leaves them unchanged passes."""
        for block in self.weights.blocks.values():
            for weight in block.weights:
                function(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        """Move everything outside of the blocks to a device. Weights that modules share stay shared."""
        moved: dict[Tensor, Tensor] = {}
        for module in self._model.modules():
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if tensor.device != device:
                    if tensor not in moved:
                        there = tensor.detach().to(device)
                        moved[tensor] = nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
                    setattr(module, name, moved[tensor])


def _check(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise PlanError(
                f"shard_weights: {name} is on the meta device, without numbers. Give the model its weights before: "
                "map_weights(model, path)."
            )
        if type(weight) is not nn.Parameter and not hasattr(weight, "__tensor_flatten__"):
            raise PlanError(
                f"shard_weights: {name} is a {type(weight).__name__}; allowed: torch.nn.Parameter, and tensors that say what they "
                "consist of by __tensor_flatten__, as those of torchao. Apply with shard_weights=False."
            )


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    raise PlanError(f"load_state_dict of a {type(module).__name__} of which every rank keeps a part. {REMEDY}")
