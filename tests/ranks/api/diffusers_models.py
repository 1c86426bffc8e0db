"""Tiny diffusers models with healthy random weights, for rank scripts: what one process makes of them, and how ranks compare."""

import functools
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers_cases import CASES, Case
from diffusers_configs import MODELS
from support.ranks import worst
from torch import Tensor, nn

from cp_runtime import ContextParallelInput, apply_context_parallel, remove_context_parallel
from cp_runtime.errors import ContextParallelError
from cp_runtime.nested import tensors


def fill(module: nn.Module, seed: int = 1) -> nn.Module:
    """Weights that make every token depend on every other one: attention that is neither uniform nor one-hot, open gates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.copy_(1.5 + 0.1 * values)
            else:
                parameter.copy_(values / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.2 * values)
    return module.eval()


# diffusers imports the file of a class when it is asked for it, which takes seconds: once, before the ranks are forked.
CLASSES = {cls: getattr(diffusers, cls) for cls, _ in MODELS.values()}


def build(name: str) -> nn.Module:
    cls, arguments = MODELS[name]
    model = CLASSES[cls](**arguments)
    if name == "flux ip adapter":
        model.encoder_hid_proj = _ImageProjection()
        for block in model.transformer_blocks:
            block.attn.set_processor(FluxIPAdapterAttnProcessor(64, 64, num_tokens=(4,), scale=[0.7]))
    return fill(model)


class _ImageProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(20, 64)

    def forward(self, embeds: list[Tensor]) -> list[Tensor]:
        return [self.projection(each) for each in embeds]


TOKENS = ContextParallelInput(1, 3)


def plan_of(model: nn.Module) -> dict[str, Any] | None:
    """The plan to pass: None where that is the model's own.

    Helios names its 40 blocks one by one: those that a tiny model lacks are left out.
    """
    names = {name for name, _ in model.named_modules()}
    if model._cp_plan is None:
        return None
    plan = {path: entry for path, entry in model._cp_plan.items() if "*" in path or path in names}
    return None if plan.keys() == model._cp_plan.keys() else plan


def forward(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """All outputs. The inputs are copied: a model must not see what another call did to them."""
    inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return tuple(tensors(model(**inputs, return_dict=False)))


def relative(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest difference on any rank, in standard deviations of that output."""
    if [out.shape for out in outputs] != [out.shape for out in expected]:
        return worst(float("inf"))
    return worst(max(((a - b).abs().max() / b.std()).nan_to_num(float("inf")) for a, b in zip(outputs, expected, strict=True)))


@functools.cache
def model_of(name: str) -> nn.Module:
    """Whoever changes it takes its changes back."""
    return build(name)


@functools.cache
def stock(case: Case) -> tuple[Tensor, ...]:
    """Outputs of a case."""
    with torch.inference_mode():
        return forward(model_of(case.model), case.make())


def prepare(_: Any) -> None:
    """Make what the ranks ask for, before they are forked (tests/support/preloaded.py): all of them find the same."""
    for case in CASES:
        stock(case)


ANYTHING = dict(ulysses_anything=True, ring_anything=True)


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything that sharding could leave behind: attributes and hooks of every module, torch's attention function."""
    state: list[Any] = [F.scaled_dot_product_attention]
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks") and value is not None]
        state.append((name, sorted(vars(module)), hooks, type(module), type(module).forward))
    return state


TOLERANCE = 1e-5
"""Largest difference, in standard deviations: docs/numerics.md."""


def close(difference: float, what: Any = "") -> None:
    """Assert that a difference is one of rounding, nan not."""
    assert difference <= TOLERANCE, f"{what}: {difference}"


def refused(run: Any, *words: str, kind: type[Exception] = ContextParallelError) -> None:
    """Assert that a call is refused, with these words in the message."""
    said = None
    try:
        run()
    except kind as error:
        said = str(error)
    assert said is not None, f"not refused: {words}"
    assert all(word in said for word in words), f"{words} not in: {said}"


def same(
    model: nn.Module, config: Any, inputs: dict[str, Any], expected: tuple[Tensor, ...], what: Any = "", plan: Any = None,
    **more: Any,
) -> None:  # fmt: skip
    """Assert that a call on ranks gives what is expected. The model is as before then."""
    apply_context_parallel(model, config, plan, **more)
    try:
        close(relative(forward(model, inputs), expected), what)
    finally:
        remove_context_parallel(model, plan)
