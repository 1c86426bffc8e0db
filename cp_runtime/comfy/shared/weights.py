"""The weights of a model: their dtypes, and samples that show changes which torch does not count.

Samples are taken at fixed offsets of a large weight. That takes milliseconds, where reading all weights would take as long as
loading them. It can miss a change of single numbers.

With DynamicVRAM a weight stays in memory as it is in the file, until it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import parameter_slots
from ...nested import stored
from ...pool.messages import Load

PREFIX = "diffusion_model."  # of ComfyUI's names for weights and modules of the transformer
READ_HERE = ("x_embedder.", "y_embedder.")  # of the transformer, with which ControlNets for SD3.5 compute
WINDOWS, WINDOW = 8, 64  # pieces of a weight, and bytes of each, at least
WHOLE = 256 << 10  # bytes: smaller weights are read whole, at a millisecond for four of them
SMALL = 16 << 10  # bytes: in `ModelPatcherDynamic.load`
STAYS = "context_parallel_stays"
AS_IN_FILE = {"comfy_cast_weights": True, STAYS: True}
"""Attributes of modules whose weights stay as in the file: see `is_small`."""


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
        numbers, window = part.view(-1), WINDOW // part.itemsize
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


def network_of(model: Any) -> Any:
    """Return the network of a `BaseModel`, its transformer, or a VAE, which is one."""
    return getattr(model, "diffusion_model", model)


def is_small(module: nn.Module, weights: Iterable[Tensor | None]) -> bool:
    """Return whether DynamicVRAM keeps a module's weights, given as in the file, in its dtype until use, since they are small."""
    parts = (part for weight in weights if weight is not None for part in stored(weight))
    return hasattr(module, "comfy_cast_weights") and sum(part.nbytes for part in parts) <= SMALL


def parameters_of(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return (full name, module, name in the module) of every parameter."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in root.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
