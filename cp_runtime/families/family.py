"""The plan of a class of ComfyUI's models, and the vocabulary of its table.

diffusers' names are long for a line of a table. Here `tokens` and `side` make a `ContextParallelInput` and `gathered` makes a
`ContextParallelOutput`, with the defaults that fit most models: hidden states are `[B, L, channels]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comfyui import TESTED
from ..engine.plan import ShardingPlan
from ..engine.state import CallState
from ..engine.transforms import ContextParallelInput, ContextParallelOutput

# One stream, or several in joint order.
Streams = str | tuple[str, ...]


def tokens(
    streams: Streams, *, dim: int = 1, dims: int = 3, frames: Callable[[CallState], int] | None = None, replicated: bool = False
) -> ContextParallelInput:
    """Split hidden states: the first such tensor defines its stream's length; `dim` counts tokens, `dims` all dimensions."""
    return ContextParallelInput(dim, dims, streams=_joint(streams), frames=frames, replicated=replicated)


def side(streams: Streams, *, dim: int, dims: int) -> ContextParallelInput:
    """Split a tensor that describes tokens and is the same for every block (positions, masks, modulation), once per call."""
    return ContextParallelInput(dim, dims, streams=_joint(streams), side=True)


def gathered(
    stream: Streams, *, dim: int = 1, dims: int = 3, within: tuple[str, ...] = (), when: Callable[[CallState], bool] | None = None
) -> ContextParallelOutput:
    """Gather the tokens of all ranks: `stream` is the module's output, or a part of it (`within`)."""
    return ContextParallelOutput(dim, dims, stream=stream, within=within, when=when)


def _joint(streams: Streams) -> tuple[str, ...]:
    return (streams,) if isinstance(streams, str) else streams


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


@dataclass(frozen=True, kw_only=True)
class FamilyPlan(ShardingPlan):
    """The sharding of one class of ComfyUI's models.

    Args:
        family: name shown to users.
        model_class: full name of the module class that the plan was written for.
        since: first of the tested versions of ComfyUI that has the class, or a newer version.
        control: kind of ControlNet residuals ("input", "middle", "output") -> the stream, or streams in joint order, that they are
            added to, or None if they are not tokens. Empty = the model takes none.
        attention_names: full names under which modules call ComfyUI's attention without passing transformer_options; a trailing
            "()" marks a function that returns the attention to call, as for a device.
        shares_batch: arguments of a call -> whether each item is computed independently of the others; None = always.
        unstaged: reason why its blocks cannot be divided into stages; "" = they can.
        rebuilt: "argument.key" of objects in dicts that the forward rebuilds if they are missing: not sent to the workers.
    """

    family: str
    model_class: str
    since: str = TESTED[0]
    control: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    attention_names: tuple[str, ...] = ()
    shares_batch: Callable[[Mapping[str, Any]], bool] | None = None
    unstaged: str = ""
    rebuilt: tuple[str, ...] = ()

    def batch_is_shared(self, arguments: Mapping[str, Any]) -> bool:
        return self.shares_batch is None or self.shares_batch(arguments)

    @property
    def shares_sequence(self) -> bool:
        """Whether ranks can share a sequence. If not, they only share a batch."""
        return bool(self.outputs)

    @property
    def origin(self) -> str:
        known = [version for version in TESTED if _numbers(version) >= _numbers(self.since)]
        checked = (
            f"checked against ComfyUI {' and '.join(known)}" if known else f"for ComfyUI {self.since}, not yet checked against it"
        )
        return f"{self.family} plan ({checked})"

    @property
    def remedy(self) -> str:
        return "Update this extension, or use a ComfyUI version it was checked against."
