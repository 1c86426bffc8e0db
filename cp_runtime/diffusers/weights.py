"""Weights of a module: memory-mapped from safetensors files, and sharded over the ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import before_apply
from ..engine.ranks.mesh import SequenceMesh
from ..engine.weights.files import mapped_tensors
from ..engine.weights.packing import AbsentWeight
from ..engine.weights.sharded import ShardedWeights
from ..errors import ConfigError, PlanError, bad_value
from .agreement import device_of

SHOWN = 4  # names in a message
INDEX = ".safetensors.index.json"


def map_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a model's weights from safetensors files without reading them: they become pages of the files, on the CPU.

    For a model built without memory for its weights, under `torch.device("meta")` or accelerate's `init_empty_weights`.
    `apply_context_parallel(model, config, shard_weights=True, device=...)` then reads this rank's shards, block by block. Weights
    get the dtypes of the files, whatever the model was built with: converting a model would mean holding all of it.

    The files must not change while the model uses them; replace one by renaming a new one over it.

    Args:
        model: its state dict has the names and shapes of the files.
        path: a file, or a folder with one, or with several and their `*.safetensors.index.json`.

    Raises:
        ConfigError: a file cannot be read, or does not fit the model. The model is then unchanged.
    """
    weights: dict[str, Tensor] = {}
    with torch.inference_mode(False):
        for file in _files(Path(path)):
            weights.update(_mapped(file))
        _check(model, weights, path)
        model.load_state_dict(weights, assign=True)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for pattern in (f"*{INDEX}", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            raise bad_value("path", str(path), "a folder with one model", f"Pass one of {_some(each.name for each in found)}.")
        if found:
            return _files_of_index(found[0]) if pattern.endswith(INDEX) else found
    raise bad_value("path", str(path), f"a .safetensors file, or a folder with one or with *{INDEX}", "Pass the model's folder.")


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of safetensors files ({error!r}). Download the model again.") from error


def _mapped(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # comes with diffusers and ComfyUI; only this function needs it

    try:
        return mapped_tensors(file)[0]
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read as a safetensors file ({error}). Check it, or download it again.") from error


def _check(model: nn.Module, weights: Mapping[str, Tensor], path: object) -> None:
    expected: dict[str, Tensor] = model.state_dict()
    wrong = [
        f"{name} {list(weights[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    problems = {
        "missing": sorted(expected.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - expected.keys()),
        "of another shape": wrong,
    }
    if any(problems.values()):
        found = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise ConfigError(
            f"{path} does not fit this {type(model).__name__}: {found}. Build the model from the file's own config.json."
        )
    if empty := [name for name in _without_numbers(model) if name not in expected]:
        raise ConfigError(
            f"{_some(empty)} of this {type(model).__name__} are on the meta device and in no file: the model computes them itself. "
            "Build it under accelerate.init_empty_weights() instead of torch.device('meta')."
        )


def _without_numbers(model: nn.Module) -> Iterable[str]:
    """Yield the names of all buffers and plain attributes that are tensors on the meta device."""
    for path, module in model.named_modules():
        tensors = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.is_meta:
                yield f"{path}.{name}" if path else name


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


REMEDY = "Call remove_context_parallel on all ranks, do this with whole weights, and call apply_context_parallel again."


class ShardedModel:
    """A model whose blocks are sharded over the ranks of a mesh.

    All ranks make it alike. Everything outside of the blocks is whole on every rank.

    Args:
        model: model with the same weights on every rank.
        device: this rank's device; None = that of the weights.

    Raises:
        PlanError: the model has no blocks, or weights that cannot be sharded. It is unchanged then. After another error, such as of
            a device without memory, blocks have lost their weights: `load_state_dict(..., assign=True)` restores them.
    """

    def __init__(self, model: nn.Module, mesh: SequenceMesh, device: torch.device | str | None) -> None:
        _check_shardable(model)
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

    def restore(self) -> None:
        """Gather all weights, where they were. All ranks must call it."""
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


def _check_shardable(model: nn.Module) -> None:
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


def _refuse_to_load(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse weights for what every rank keeps a part of. Others, such as those of a LoRA, are loaded whole on each."""
    parts = [name for name, weight in module.named_parameters(prefix.rstrip(".")) if isinstance(weight, AbsentWeight)]
    if given := [name for name in parts if name in state_dict]:
        raise PlanError(f"load_state_dict of {_some(given)}, of which every rank keeps a part. {REMEDY}")
