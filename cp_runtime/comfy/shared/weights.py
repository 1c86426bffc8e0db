"""The weights of a model: their dtypes, and comparisons, in one process bit by bit, between two processes by a few bytes of each.

Samples are taken at fixed offsets of a large weight; of a quantised weight, from its data and its scales. That takes milliseconds,
where reading all weights would take as long as loading them. It finds any other model, but can miss a change of single numbers, so
files are compared by their stamps as well (`recipe.file_stamp`), and the pages that a process has written to (`pages.written`).

With DynamicVRAM a weight stays in memory as it is in the file, until it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import parameter_slots
from ...engine.weights.cast import memory_of, plain
from ...nested import stored
from ...pool.messages import Load

PREFIX = "diffusion_model."  # of ComfyUI's names for weights and modules of the transformer
WINDOWS, WINDOW = 8, 64  # pieces of a weight, and bytes of each, at least
WHOLE = 256 << 10  # bytes: smaller weights are read whole, which takes a millisecond for four of them
SMALL = 16 << 10  # bytes: in `ModelPatcherDynamic.load`
STAYS = "context_parallel_stays"  # attribute of modules for which `stays_as_in_file` returned True


def sample_weights(model: nn.Module, without: Collection[str] = ()) -> dict[str, str]:
    """Return for each parameter its storage format and a hash of its samples, with a space between them.

    Left out are parameters in `without`, those without bytes in this process, and those that are not contiguous.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    samples = {name: sample(parameter) for name, parameter in parameters if name not in without}
    return {name: sample for name, sample in samples.items() if sample}


def differing_weight(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first weight that both sides store in the same format and with other content, or None."""
    for name, sample in one.items():
        kind, _, digest = sample.partition(" ")
        other_kind, _, other_digest = other.get(name, "").partition(" ")
        if kind == other_kind and digest != other_digest:
            return name
    return None


def same_weight(one: Tensor, other: Tensor) -> bool:
    """Return whether two weights are stored alike; for quantised ones, data and scales."""
    ones, others = ([_bytes(plain(part)) for part in stored(weight)] for weight in (one, other))
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def weight_patches_digest(request: Load, block: Tensor) -> str:
    """Return the SHA-256 of weight patches as sent, their tree and tensor bytes, to check their arrival. For bytes that never leave
    this computer's memory, samples are enough: reading all takes seconds per GB, in every process."""
    digest = hashlib.sha256(json.dumps(request.patches, separators=(",", ":")).encode())
    digest.update(block.numpy().data if request.travelled else sample(block).encode())
    return digest.hexdigest()


def sample(weight: Tensor) -> str:
    """Return the storage format of a tensor and a hash of some of its bytes; empty where it has none in this process."""
    parts = stored(weight)
    if any(part.device.type == "meta" or not part.is_contiguous() for part in parts):
        return ""
    kind = "+".join(f"{part.dtype}{list(part.shape)}".replace(" ", "") for part in parts)
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        numbers, window = memory_of(part).view(-1), WINDOW // part.itemsize
        if part.nbytes > WHOLE:
            step, rest = divmod(numbers.numel() - window, WINDOWS - 1)
            numbers = numbers.as_strided((WINDOWS, window + rest), (step, 1))  # the last one ends where the weight does
        digest.update(_bytes(numbers.to(part.dtype)).numpy().data)
    return f"{kind} {digest.hexdigest()}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def is_dynamic(model: Any) -> bool:
    """Return whether DynamicVRAM has loaded a model, whichever patcher it has now. Ranks do without it."""
    return "dynamic_patchers" in vars(model)


def model_dtype(model: Any, module: nn.Module, name: str) -> torch.dtype:
    """Return the dtype of a parameter of one of a model's modules. A quantised one stays as it is."""
    weight = parameter_slots(module)[name]
    noted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
    return weight.dtype if noted is None or not is_dynamic(model) or hasattr(weight, "__tensor_flatten__") else noted


def dtypes_of(model: Any) -> tuple[str, str]:
    """Return the names of a model's weight dtype, and of its compute dtype if that differs. `model`: or a VAE."""
    if hasattr(model, "manual_cast_dtype"):
        return str(model.get_dtype()), str(model.manual_cast_dtype)
    weights = (
        (module, name) for module in model.modules() for name, weight in parameter_slots(module).items() if weight is not None
    )
    return str(next((model_dtype(model, *weight) for weight in weights), None)), str(None)


def network_of(model: Any) -> Any:
    """Return the network of a `BaseModel`, its transformer, or a VAE, which is one."""
    return getattr(model, "diffusion_model", model)


def stays_as_in_file(module: nn.Module, weights: Iterable[Tensor | None]) -> bool:
    """Return whether DynamicVRAM keeps a module's weights, given as in the file, in its dtype until use, since they are small; if
    so, mark the module."""
    parts = (part for weight in weights if weight is not None for part in stored(weight))
    small = hasattr(module, "comfy_cast_weights") and sum(part.nbytes for part in parts) <= SMALL
    if small:
        vars(module).update({"comfy_cast_weights": True, STAYS: True})
    return small
