"""Layers that make numbers of the blocks whenever they run, and apply patches then."""

from __future__ import annotations

from typing import Any, NamedTuple

import comfy.lora
import comfy.model_management
import comfy.ops
import torch
from torch import Tensor

from .blocks import unpack

FLOAT, PACKED = "F32", "Q8"


class BlockTensor(Tensor):
    """A weight as it is in the file: `shape` is that of its numbers, and nothing copies or detaches it."""

    def __new__(cls, data: Tensor, **_: Any) -> BlockTensor:
        return Tensor._make_subclass(cls, data)

    def __init__(self, _: Tensor, *, tensor_type: str, tensor_shape: torch.Size) -> None:
        super().__init__()
        self.tensor_type, self.tensor_shape = tensor_type, tensor_shape
        self.patches: list[Any] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        new: Any = super().to(*args, **kwargs)
        new.tensor_type = getattr(self, "tensor_type", FLOAT)  # results of operations have no attributes
        new.tensor_shape, new.patches = getattr(self, "tensor_shape", new.size()), list(getattr(self, "patches", []))
        return new

    def clone(self, *_: Any, **__: Any) -> Any:
        return self

    def detach(self) -> Any:
        return self

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return getattr(self, "tensor_shape", None) or self.size()


class Entry(NamedTuple):
    """An entry of `BlockTensor.patches`."""

    patches: list[Any]
    key: str


class OtherEntry(NamedTuple):
    """The same in another pack."""

    function: Any
    patches: list[Any]
    key: str


def is_packed(weight: Any) -> bool:
    return getattr(weight, "tensor_type", FLOAT) == PACKED


class Ops(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        comfy_cast_weights = True
        dequant_dtype: Any = None
        patch_dtype: Any = None
        entry: type[Entry | OtherEntry] = Entry

        def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight: Any = None
            self.bias: Any = None

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
            for name in ("weight", "bias"):
                value = state_dict.get(prefix + name)
                if value is not None:
                    setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            for name in ("weight", "bias"):
                if getattr(self, name) is not None:
                    destination[prefix + name] = torch.zeros(1, device="meta")

        def numbers(self, weight: Any, dtype: torch.dtype) -> Tensor:
            entries = [self.entry(*entry) for entry in weight.patches]
            patches = [patch for entry in entries for patch in entry.patches]
            if is_packed(weight):
                asked = dtype if self.dequant_dtype == "target" else self.dequant_dtype
                made = unpack(weight.as_subclass(Tensor), weight.tensor_shape, asked).to(dtype)
            else:
                made = weight.as_subclass(Tensor).to(dtype)
            if not patches:
                return made
            key = entries[0].key
            asked = dtype if self.patch_dtype == "target" else self.patch_dtype
            return comfy.lora.calculate_weight(patches, made, key, *([asked] if asked is not None else []))

        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            if not is_packed(self.weight):
                return super().forward_comfy_cast_weights(x)
            bias = None if self.bias is None else self.bias.as_subclass(Tensor).to(x.device, x.dtype)
            return torch.nn.functional.linear(x, self.numbers(self.weight.to(x.device), x.dtype), bias)


class OtherOps(Ops):
    class Linear(Ops.Linear):
        entry = OtherEntry
