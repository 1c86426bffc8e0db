"""The blocks of a model, found in its lists of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...compat import as_parameter, parameter_slots
from ...nested import stored

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SMALLEST = 1 << 14  # least bytes of a block: smaller ones are not worth a message


class Slot(NamedTuple):
    """A parameter's location: an entry of `compat.parameter_slots`."""

    module: nn.Module
    key: str


class Block:
    """A module whose weights are moved together.

    Args:
        name: its path in the model.
        slots: slots of each of its weights, by the weight's path in the model; a weight that several modules share has several.
    """

    def __init__(self, name: str, module: nn.Module, slots: dict[str, list[Slot]]) -> None:
        self.name, self.module, self.slots = name, module, slots
        # Even without autograd, torch may add up in another order for weights with requires_grad (`at::matmul`). Inference tensors
        # cannot have it.
        self._requires_grad = [weight.requires_grad and not weight.is_inference() for weight in self.weights]

    @property
    def weights(self) -> list[Tensor]:
        return [parameter_slots(slot.module)[slot.key] for (slot, *_) in self.slots.values()]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for weight in self.weights for part in stored(weight))

    def clear(self) -> None:
        for slot in (slot for slots in self.slots.values() for slot in slots):
            parameter_slots(slot.module)[slot.key] = None

    def put(self, weights: list[Tensor]) -> None:
        for slots, weight, requires_grad in zip(self.slots.values(), weights, self._requires_grad, strict=True):
            parameter = as_parameter(weight, requires_grad)
            for slot in slots:
                parameter_slots(slot.module)[slot.key] = parameter


class Sizes(NamedTuple):
    """Bytes of a model's weights: of its blocks together, of the largest one, and outside of blocks; and the number of blocks."""

    blocks: int
    largest: int
    rest: int
    number: int = 0

    @property
    def whole(self) -> int:
        return self.blocks + self.rest

    def per_rank(self, ranks: int, *, on_host: bool = False, shared: int = 0) -> int:
        """Return the bytes on the device of one rank out of `ranks` that share the model, two blocks at a time included.

        `shared`: blocks of which it has a part, where it has others whole; 0 = all.
        """
        part, whole = self.blocks, 0
        if shared:  # spread through the model, so that they are as large as others: up to one block
            whole = min(self.blocks, self.blocks * (self.number - shared) // self.number + self.largest)
            part = self.blocks - whole
        return self.rest + whole + 2 * self.largest + (0 if on_host else -(-part // ranks))


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the blocks of a model: the elements of its lists of modules. Of nested lists, the innermost count; a list inside an
    element does not.

    An element runs on all ranks or on none. Modules inside it need not: experts run on ranks that have tokens for them. Weights
    that are used outside of their element too, and elements with hardly any, are not part of a block.
    """
    elements: dict[nn.Module, str] = {}

    def visit(path: str, module: nn.Module, is_list: bool) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if isinstance(child, LISTS) or not is_list:
                visit(where, child, isinstance(child, LISTS))
            else:
                elements.setdefault(child, where)

    visit("", model, isinstance(model, LISTS))
    everywhere = _weights_in(model)
    blocks = []
    for element, path in elements.items():
        inside = _weights_in(element, path).items()
        slots = {name: places for weight, (name, places) in inside if len(places) == len(everywhere[weight][1])}
        blocks.append(Block(path, element, slots))
    return [block for block in blocks if block.nbytes >= SMALLEST]


def _weights_in(model: nn.Module, path: str = "") -> dict[int, tuple[str, list[Slot]]]:
    """Return path and slots of every weight inside a module, by the weight's id."""
    found: dict[int, tuple[str, list[Slot]]] = {}
    for name, module in model.named_modules(prefix=path):
        for key, weight in parameter_slots(module).items():
            if weight is not None:
                found.setdefault(id(weight), (f"{name}.{key}", []))[1].append(Slot(module, key))
    return found


def sizes_of(model: nn.Module, dtype_of: Callable[[nn.Module, str], torch.dtype] | None = None) -> Sizes:
    """Return the sizes of a model's weights. `dtype_of`: dtype of a module's parameter on a device, if it differs."""

    def nbytes(slot: Slot) -> int:
        weight: Tensor = parameter_slots(slot.module)[slot.key]
        parts = stored(weight)
        if dtype_of is None or len(parts) > 1 or not parts[0].is_floating_point():
            return sum(part.nbytes for part in parts)
        return weight.numel() * dtype_of(*slot).itemsize

    blocks = [sum(nbytes(places[0]) for places in block.slots.values()) for block in blocks_of(model)]
    return Sizes(
        sum(blocks),
        max(blocks, default=0),
        sum(nbytes(places[0]) for _, places in _weights_in(model).values()) - sum(blocks),
        len(blocks),
    )


def spread(blocks: Sequence[Block], count: int) -> list[Block]:
    """Return some of the blocks, as far from each other as they can be: while those between them compute, one can be fetched."""
    return [blocks[(2 * place + 1) * len(blocks) // (2 * count)] for place in range(count)]
