"""The plan of one class of ComfyUI's models, and the words that its table is written in.

diffusers' names are long for a line of a table. Here `tokens` and `side` make a `ContextParallelInput` and `gathered` makes a
`ContextParallelOutput`, with the defaults that fit most models: hidden states are `[B, L, channels]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.plan import ShardingPlan
from ..engine.state import CallState
from ..engine.transforms import ContextParallelInput, ContextParallelOutput

COMFYUI = "0.30.0"
"""The version of ComfyUI that the tables were checked against."""

# One stream, or several in joint order.
Streams = str | tuple[str, ...]


def tokens(
    streams: Streams, *, dim: int = 1, dims: int = 3, frames: Callable[[CallState], int] | None = None, replicated: bool = False
) -> ContextParallelInput:
    """Hidden states: the first such tensor says how long its stream is. `dim` counts tokens, `dims` is the number of dimensions."""
    return ContextParallelInput(dim, dims, streams=_joint(streams), frames=frames, replicated=replicated)


def side(streams: Streams, *, dim: int, dims: int) -> ContextParallelInput:
    """What speaks about tokens and is the same for every block: positions, masks, modulation. It is split once per call."""
    return ContextParallelInput(dim, dims, streams=_joint(streams), side=True)


def gathered(
    stream: Streams, *, dim: int = 1, dims: int = 3, within: tuple[str, ...] = (), when: Callable[[CallState], bool] | None = None
) -> ContextParallelOutput:
    """Where the tokens of all ranks come together again: `stream` is what the module returns, or a part of it (`within`)."""
    return ContextParallelOutput(dim, dims, stream=stream, within=within, when=when)


def _joint(streams: Streams) -> tuple[str, ...]:
    return (streams,) if isinstance(streams, str) else streams


@dataclass(frozen=True, kw_only=True)
class FamilyPlan(ShardingPlan):
    """How one class of ComfyUI's models is sharded.

    Args:
        family: name shown to users.
        model_class: full name of the module class that the plan was written for.
        control: kind of ControlNet residuals ("input", "middle", "output") -> the stream, or streams in joint order, that they
            are added to, or None where they are no tokens. Empty = the model takes none.
        attention_names: full names of functions that ComfyUI's attention is called by where no transformer_options reach it.
        shares_batch: given the arguments of a call, whether what the model computes of one item is the same without the
            others; None = always.
        rebuilt: "argument.key" of objects in dicts that the forward makes again where they are missing: not sent to the workers.
    """

    family: str
    model_class: str
    control: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    attention_names: tuple[str, ...] = ()
    shares_batch: Callable[[Mapping[str, Any]], bool] | None = None
    rebuilt: tuple[str, ...] = ()

    def batch_is_shared(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the items of a call may be computed on different ranks."""
        return self.shares_batch is None or self.shares_batch(arguments)

    @property
    def shares_sequence(self) -> bool:
        """Whether ranks can share a sequence. If not, they share a batch only."""
        return bool(self.outputs)

    @property
    def origin(self) -> str:
        return f"{self.family} plan (checked against ComfyUI {COMFYUI})"

    @property
    def remedy(self) -> str:
        return "Update this extension, or use the ComfyUI version it was checked against."
