"""Weights from safetensors files that are mapped, not read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engine.weights.files import mapped_tensors
from ..errors import ConfigError, bad_value

SHOWN = 4  # names in a message
INDEX = ".safetensors.index.json"


def map_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give a model its weights from safetensors files without reading them: they become pages of the files, on the CPU.

    For a model that was built without memory for its weights, under `torch.device("meta")` or accelerate's `init_empty_weights`.
    `apply_context_parallel(model, config, shard_weights=True, device=...)` then reads what this rank keeps, block by block. Weights
    get the dtypes of the files, whatever the model was built with: converting a model would mean holding all of it.

    The files must stay as they are while the model uses them; replace one by renaming a new one over it.

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
    from safetensors import SafetensorError  # comes with diffusers and ComfyUI; nothing else here needs it

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
