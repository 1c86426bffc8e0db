"""Text processing that some transformers do before sampling, with weights of their own: LTX-2, Anima, MiniMax.

ComfyUI calls it in this process, where a model that lives on the workers has no weights but the pages of its file, unpatched and
on no device. The modules that it runs get their weights for the duration, patched as ComfyUI patches what it loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..model.wire_dtypes import model_dtype

PREFIX = "diffusion_model."


@contextmanager
def weights_at(patcher: ModelPatcher, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give modules of the model that are called their patched weights on a device, while active."""
    paths = {module: path for path, module in model.named_modules() if path}
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def bring(called: nn.Module, _: Any) -> None:
        path = paths.get(called)
        if path is None:
            return  # another model's, or inside a module that was called before
        for inner, module in called.named_modules(prefix=path):
            paths.pop(module, None)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if (dtype := model_dtype(patcher.model, module, name)) != parameter.dtype:
                        put(module._parameters, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
                    weight = patcher.patch_weight_to_device(f"{PREFIX}{inner}.{name}", device, return_weight=True)
                    put(module._parameters, name, nn.Parameter(weight.to(device), requires_grad=False))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    put(module._buffers, name, buffer.to(device))

    def put(owner: dict[str, Any], name: str, value: torch.Tensor) -> None:
        kept.append((owner, name, owner[name]))
        owner[name] = value

    hook = register_module_forward_pre_hook(bring)
    try:
        yield
    finally:
        hook.remove()
        for owner, name, value in reversed(kept):
            owner[name] = value
