"""Tiny models of every family, and calls of their innermost forward that use what the family can do. One module per family.

Imported by rank scripts (which have ComfyUI) and by tests (which have not): only torch here.

A module offers `MODELS` (name -> Model), `CASES` (calls compared with the stock forward in one process) and `SERVED` (how a graph
on a real server samples its models).
"""

import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import next_classes


@dataclass(frozen=True)
class Model:
    """A transformer that is small enough for a test.

    Args:
        cls: full name of the module class.
        arguments: of its constructor, besides dtype, device and operations.
        config: class of `comfy.supported_models` that wraps it.
        unet: further entries of ComfyUI's `unet_config`, such as image_model.
        init: (name, parameter or buffer, standard normal values of its shape) -> values, or None for the default; where random
            values of the usual size make the model ignore its input, or overflow. Buffers stay as they are by default.
        conditioner: shapes of further tensors of a checkpoint, which ComfyUI's model around the transformer takes.
        since: first of the tested versions of ComfyUI that has it; 0 = all have it.
        sizes: module -> whole numbers in its code -> those to put there, where the constructor leaves no choice.
    """

    cls: str
    arguments: Mapping[str, Any]
    config: str
    unet: Mapping[str, Any] = field(default_factory=dict)
    init: Callable[[str, Tensor, Tensor], Tensor | None] | None = None
    conditioner: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    since: str = "0"
    sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        name: unique in the module.
        model: key of MODELS.
        make: returns the arguments of the innermost forward, by name.
        matters: arguments without which the output must be another one, so that the case proves something about them.
        options: entries of transformer_options.
        tolerance: of the difference, relative to the standard deviation of the stock output; docs/numerics.md says why.
        since: first of the tested versions of ComfyUI that can do it, where that is not the model's.
    """

    name: str
    model: str
    make: Callable[[], dict[str, Any]]
    matters: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    since: str = "0"


@dataclass(frozen=True)
class Served:
    """A graph: Load Diffusion Model on a tiny checkpoint of `model`, a sampler, random conditioning.

    Args:
        name: unique over all families; also the name of the checkpoint file.
        model: key of MODELS.
        latent: shape without batch, as ComfyUI's latent of that family has it; several shapes make a nested latent.
        tokens, width: of the text conditioning.
        cond: further entries of the conditioning: name -> shape of a random tensor (a tuple, batch of 1 included), a small tensor
            as it is (a mask, token ids), a plain value, or lists and dicts of such. A shape for `clip_vision_output` is that of its
            hidden states.
        cfg: 1.0 runs the positive conditioning alone.
        single: the model refuses batches.
    """

    name: str
    model: str
    latent: tuple[int, ...] | list[tuple[int, ...]]
    tokens: int
    width: int
    cond: Mapping[str, Any] = field(default_factory=dict)
    cfg: float = 1.0
    batch: int = 1
    single: bool = False


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def denoise(
    batch: int, latent: tuple[int, ...], text: int, width: int = 48, time: str = "timestep", most: float = 0.9, **more: Any
) -> dict[str, Any]:
    """What nearly every forward takes: a latent, one timestep per item of the batch, and the text.

    Args:
        latent: shape of `x` without the batch.
        text, width: tokens of `context`, and their channels.
        time, most: name of the timesteps, and the largest; the smallest is a third of it.
        more: other arguments.
    """
    timesteps = torch.linspace(most / 3, most, batch)
    return {"x": normal(batch, *latent), time: timesteps, "context": normal(batch, text, width), **more}


def fan_in(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Values for `Model.init`: convolutions have kernels, which the default scale forgets."""
    return values / parameter[0].numel() ** 0.5 if parameter.ndim > 2 else None


def residuals(batch: int = 1, tokens: int = 36, outputs: int = 2) -> dict[str, list[Tensor | None]]:
    """What ComfyUI makes of a ControlNet: some blocks get nothing, some share what they get, the list may be too long."""
    shared = normal(batch, tokens, 128, seed=8)
    return {"input": [None, normal(batch, tokens, 128, seed=7)], "middle": [], "output": [shared] * outputs}


def text_mask(batch: int, text: int, seed: int = 3) -> Tensor:
    """A key mask `[B, text]`, 0 and 1, that leaves out some tokens, never the first."""
    mask = (torch.rand(batch, text, generator=torch.Generator().manual_seed(seed)) > 0.4).long()
    mask[:, 0] = 1
    return mask


def joint_mask(batch: int, text: int, image: int) -> Tensor:
    """Text attends to text and to half of the image, the image to everything: a regional mask, `[B, L, L]`, boolean."""
    mask = torch.ones(batch, text + image, text + image, dtype=torch.bool)
    mask[:, :text, text + image // 2 :] = False
    mask[:, text:, 1:3] = False
    return mask


def version() -> str | None:
    """The version of ComfyUI that the tests run on; None = the newest that was tested, where there is none."""
    file = Path(os.environ.get("COMFYUI_PATH", "")) / "comfyui_version.py"
    return next(iter(re.findall(r'__version__ = "(.*)"', file.read_text())), None) if file.is_file() else None


@functools.cache
def load(name: str, of: str | None = "here") -> SimpleNamespace:
    """MODELS, CASES and SERVED of a family, without those that a version of ComfyUI does not have and that have no stand-in.

    Args:
        of: that version; "here" = the one that the tests run on, None = the newest.
    """
    module = importlib.import_module(f"{__name__}.{name}")
    models = {key: model for key, model in module.MODELS.items() if exists(model.since, of) or next_classes.has(model.cls)}
    cases = [case for case in module.CASES if case.model in models and exists(case.since, of)]
    served = [entry for entry in module.SERVED if entry.model in models and exists(models[entry.model].since, of)]
    return SimpleNamespace(MODELS=models, CASES=cases, SERVED=served)


def exists(since: str, of: str | None = "here") -> bool:
    """Whether what came with a version of ComfyUI is in another one, `of`, as for `load`."""
    newest = version() if of == "here" else of
    return newest is None or _numbers(since) <= _numbers(newest)


def _numbers(dotted: str) -> list[int]:
    return [int(number) for number in dotted.split(".")]


def case(family: str, name: str) -> Case:
    """One of its cases."""
    (found,) = [case for case in load(family).CASES if case.name == name]
    return found


NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def served() -> dict[str, tuple[str, Served, Model]]:
    """Name -> (family module, entry, model) of every entry of every module."""
    return {entry.name: (name, entry, load(name).MODELS[entry.model]) for name in NAMES for entry in load(name).SERVED}


def checkpoint_of(entry: Served) -> str:
    """File name of its checkpoint."""
    return f"family-{entry.name}.safetensors"
