"""What the sharded forward is compared with: every family's models and the outputs of their stock forward, made once.

`prepare` runs before the ranks are forked (tests/support/preloaded.py), so all of them, in every mode, find the same.
"""

import functools
import sys

import torch
from support import families
from support.models import build

from cp_runtime.comfy.ui.interception import innermost_method
from cp_runtime.nested import map_tensors


def clone(value):
    return map_tensors(value, torch.Tensor.clone)


def forward(model, inputs, options):
    return getattr(model, innermost_method(model))(**clone(inputs), transformer_options=clone(dict(options)))


def distance(out, expected):
    """Largest difference of any output, and the least standard deviation."""
    pairs = [(out, expected)] if isinstance(out, torch.Tensor) else list(zip(out, expected, strict=True))
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    return max(((a - b).abs().max() / b.std()).item() for a, b in pairs), min(b.std().item() for _, b in pairs)


@functools.cache
def models(family):
    """By name. Whoever changes one takes its changes back."""
    return {name: build(model) for name, model in families.load(family).MODELS.items()}


@functools.cache
def stock(family, name):
    """Output of a case, and the difference that each argument makes which must matter."""
    case = families.case(family, name)
    model, inputs = models(family)[case.model], case.make()
    with torch.inference_mode():
        expected = forward(model, inputs, case.options)
        others = {
            name: distance(forward(model, {k: v for k, v in inputs.items() if k != name}, case.options), expected)[0]
            for name in case.matters
        }
    return expected, others


def prepare(names):
    """Make what the ranks ask for. An error is left to the case that it belongs to."""
    for family in names:
        for case in families.load(family).CASES:
            try:
                stock(family, case.name)
            except Exception as error:  # noqa: BLE001  (the ranks meet it again)
                sys.stderr.write(f"{family}, {case.name}: {error}\n")
