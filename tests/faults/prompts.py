"""Prompts of the fault suite that must give the right latent, whatever happened before."""

from typing import Any

from support.graphs import flux_prompt
from support.server import ComfyServer
from torch import Tensor

TOLERANCE = 2e-4
"""Largest difference from the stock latent, in standard deviations: docs/numerics.md."""


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Assert that a latent is the expected one, but for rounding."""
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


def assert_right(server: ComfyServer, expected: Tensor, cp: dict[str, Any], **settings: Any) -> list[int]:
    """Assert that a prompt gives a latent on the ranks that `cp` asks for. Return their pids: they are started in that order."""
    assert_close(server.sample(flux_prompt(cp=cp, **settings), timeout=120), expected)
    return server.worker_pids()
