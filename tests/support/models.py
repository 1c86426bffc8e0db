"""Builds the tiny models of `support.families`. Imports ComfyUI.

    python -m support.models OUT NAME…

writes a checkpoint for each Served entry so named into OUT, with PYTHONPATH at ComfyUI and this package's parent, and prints a JSON
object with the error of each that could not be built. `support.detection` makes ComfyUI load them.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import comfy.cli_args

    comfy.cli_args.args.cpu = True

import comfy.ops
import torch
from safetensors.torch import save_file
from torch import nn

from . import families, next_classes
from .families import Model
from .sizes import resize

PREFIX = "model.diffusion_model."
"""What ComfyUI takes off, whatever else a model's names begin with."""


def build(spec: Model, seed: int = 1) -> nn.Module:
    """A model whose weights make every token depend on every other one."""
    name, _, cls = spec.cls.rpartition(".")
    next_classes.put_in_place(name)
    resize(spec.sizes)
    model = getattr(importlib.import_module(name), cls)(
        **spec.arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            own = spec.init(name, parameter, values) if spec.init else None
            if own is not None:
                parameter.copy_(own)
            elif "norm" in name and parameter.ndim == 1:
                parameter.copy_(1.5 + 0.1 * values)
            else:
                parameter.copy_(values / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.2 * values)
        for name, buffer in model.named_buffers():
            own = spec.init(name, buffer, torch.randn(buffer.shape, generator=generator)) if spec.init else None
            if own is not None:
                buffer.copy_(own)
    return model.eval().requires_grad_(False)


def write(spec: Model, path: Path) -> None:
    """Save a model in a file that says what it is."""
    tensors = {PREFIX + name: value.contiguous().clone() for name, value in build(spec).state_dict().items()}
    tensors |= {f"{PREFIX}conditioner.{name}": families.normal(*shape) for name, shape in spec.conditioner.items()}
    entry: dict[str, Any] = {"config": spec.config, "unet_config": {**spec.arguments, **spec.unet}, "sizes": spec.sizes}
    save_file(tensors, path, metadata={"test_model": repr(entry)})


def main(out: Path, names: list[str]) -> None:
    errors = {}
    for name in names:
        _, entry, model = families.served()[name]
        try:
            write(model, out / families.checkpoint_of(entry))
        except Exception:  # noqa: BLE001  (one family's error must not hide the others)
            errors[name] = traceback.format_exc()
    sys.stdout.write(f"\n{json.dumps(errors)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
