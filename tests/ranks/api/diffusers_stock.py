"""What the sharded models are compared with: every model of diffusers_cases.py and what it gives in one process, made once.

`prepare` runs before the ranks are forked (tests/support/preloaded.py), so all of them, in every mode, find the same.
"""

import functools

import torch
from diffusers_cases import CASES
from diffusers_models import build, forward


@functools.cache
def model(name):
    """Whoever changes it takes its changes back."""
    return build(name)


@functools.cache
def stock(case):
    """Outputs of a case."""
    with torch.inference_mode():
        return forward(model(case.model), case.make())


def prepare(_):
    """Make what the ranks ask for."""
    for case in CASES:
        stock(case)
