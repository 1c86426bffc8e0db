"""Attention as one operator that is opaque to compilers, so that the collectives inside it break no graph.

Compiled blocks call `context_parallel::attention`, which hands over to the running call (`serving`): a graph compiled in one call,
or for one block, knows nothing about the call or block that it runs in later. Everything that is constant for a point in a module,
such as whether its attention is local by the plan, is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import PlanError


class Asked(NamedTuple):
    """One attention of compiled code.

    Args:
        q, k, v: `[B, L, H, D]`, `[B, S, K, D]`, `[B, S, K, E]`.
        mask: additive or boolean, with as many dimensions as the model gives it.
        backend: name of the attention function that the model asked for, or of the scope that it is in.
        scale: factor for the scores; None = 1 / sqrt(D).
        precision: least precision of the scores.
        grouped: K divides H, and each key serves H/K heads.
        low_precision: whether quantised scores will do.
        local: no communication, whatever the tokens, because the plan says so for a module around it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    backend: str
    scale: float | None
    precision: torch.dtype | None
    grouped: bool
    low_precision: bool
    local: bool


Server = Callable[[Asked], Tensor]
"""Attention of a running call, `[B, L, H, E]`."""


@dataclass
class CompileContext:
    """The compiler's position in a block.

    Attributes:
        in_block: a compiled block runs, or is being compiled.
        local: depth in modules whose attention is local by the plan; 0 outside of them, and whenever nothing is compiled.
        layers: of the block that runs, those that are operators (`opaque_layers`).
        scopes: names of the attending modules around, and what a plan or rule says of them (`hooks`).
    """

    in_block: bool = False
    local: int = 0
    layers: Sequence[nn.Module] = ()
    scopes: list[str] = field(default_factory=list)


COMPILING = CompileContext()
_servers: list[Server] = []


@contextmanager
def serving(server: Server) -> Iterator[None]:
    """Let a running call answer the operator. Single-threaded, as ranks are."""
    _servers.append(server)
    try:
        yield
    finally:
        _servers.pop()


@torch.library.custom_op("context_parallel::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    backend: str,
    scale: float | None,
    precision: torch.dtype | None,
    grouped: bool,
    low_precision: bool,
    local: bool,
) -> Tensor:
    """Compute attention through the running call, `[B, L, H, E]`, contiguous. For the arguments see `Asked`: torch wants each."""
    if not _servers:
        raise PlanError("a compiled block ran outside of a sharded call")
    return _servers[-1](Asked(q, k, v, mask, backend, scale, precision, grouped, low_precision, local)).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))
