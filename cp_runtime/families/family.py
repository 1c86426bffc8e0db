"""The plan of one class of ComfyUI's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.plan import ShardingPlan


@dataclass(frozen=True, kw_only=True)
class FamilyPlan(ShardingPlan):
    """How one class of ComfyUI's models is sharded.

    Args:
        family: name shown to users.
        model_class: full name of the module class that the plan was written for.
        comfyui: version of ComfyUI the argument names were checked against.
        control: kind of ControlNet residuals ("input", "middle", "output") -> the stream, or streams in joint order, that they
            are added to, or None where they are no tokens. Empty = the model takes none.
        attention_names: full names of functions that ComfyUI's attention is called by where no transformer_options reach it.
        shares_batch: given the arguments of a call, whether what the model computes of one item is the same without the
            others; None = always.
        rebuilt: "argument.key" of objects in dicts that the forward makes again where they are missing: not sent to the workers.
    """

    family: str
    model_class: str
    comfyui: str = "0.30.0"
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
        return f"{self.family} plan (checked against ComfyUI {self.comfyui})"

    @property
    def remedy(self) -> str:
        return "Update this extension, or use the ComfyUI version it was checked against."
