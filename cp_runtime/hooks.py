"""Apply a plan to a module with hooks over its own forward, and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import PlanError
from .mesh import SequenceGroup
from .plan import CallState, ContextParallelOutput, FamilyPlan, ModulePlan, argument_names, find_modules


class AppliedPlan:
    """A plan on a model. Outside of `call` the model behaves as if no plan were there.

    One call at a time and one thread, as in a worker rank.

    Args:
        model: the module the plan was written for.
        plan: what to split and gather.
        group: the ranks that share the sequence.
    """

    def __init__(self, model: nn.Module, plan: FamilyPlan, group: SequenceGroup) -> None:
        plan.check(model)
        self.group = group
        self._state: CallState | None = None
        self._attention: list[tuple[str, ...]] = []
        self._handles: list[RemovableHandle] = []
        self.on_module: Callable[[], None] | None = None
        for pattern, module_plan in plan.modules.items():
            for name, module in find_modules(model, pattern):
                self._handles.append(module.register_forward_pre_hook(self._enter(name, module, module_plan), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave))
                for local in module_plan.local:
                    for _, inner in find_modules(module, local):
                        self._handles.append(inner.register_forward_pre_hook(self._enter_local))
                        self._handles.append(inner.register_forward_hook(self._leave))
        for path, output in plan.outputs.items():
            for name, module in find_modules(model, path):
                self._handles.append(module.register_forward_hook(self._gather(name, output)))

    @property
    def state(self) -> CallState:
        """State of the running call."""
        if self._state is None:
            raise PlanError("no sharded call is running")
        return self._state

    @property
    def attention(self) -> tuple[str, ...]:
        """Streams of the self-attention at this point of the forward; empty where attention needs no communication."""
        return self._attention[-1] if self._attention else ()

    @contextmanager
    def call(self, on_module: Callable[[], None] | None = None) -> Iterator[CallState]:
        """Shard what runs inside. `on_module` is called whenever a planned module is entered."""
        if self._state is not None:
            raise PlanError("a sharded call is running already")
        self._state = CallState(self.group.rank, self.group.size)
        self.on_module = on_module
        try:
            yield self._state
        finally:
            self._state, self.on_module = None, None
            self._attention.clear()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, name: str, module: nn.Module, plan: ModulePlan) -> Callable[..., Any]:
        positions = {argument: i for i, argument in enumerate(argument_names(module))}

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if self._state is None:
                return None
            if self.on_module is not None:
                self.on_module()
            values, named = list(args), dict(kwargs)
            for argument, transform in plan.inputs.items():
                where, position = f"{name}({argument})", positions[argument]
                if argument in named:
                    named[argument] = transform(self._state, named[argument], where)
                elif position < len(values):
                    values[position] = transform(self._state, values[position], where)
            self._attention.append(plan.attention)
            return tuple(values), named

        return hook

    def _enter_local(self, *_: Any) -> None:
        if self._state is not None:
            self._attention.append(())

    def _leave(self, *_: Any) -> None:
        if self._state is not None:
            self._attention.pop()

    def _gather(self, name: str, output: ContextParallelOutput) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, value: Tensor) -> Tensor | None:
            if self._state is None:
                return None
            if output.expected_dims is not None and value.ndim != output.expected_dims:
                raise PlanError(f"{name}: expected an output of {output.expected_dims} dimensions, got {tuple(value.shape)}")
            layout, rank = self._state.layout((output.stream,)), self._state.rank
            if value.shape[output.gather_dim] != layout.local_lengths[rank]:
                raise PlanError(
                    f"{name}: dimension {output.gather_dim} of the output {tuple(value.shape)} is not this rank's "
                    f"{layout.local_lengths[rank]} tokens of stream {output.stream!r}"
                )
            owned = value.narrow(output.gather_dim, 0, layout.owned_lengths[rank])  # one stream: all or none is a stand-in
            return self.group.all_gather(owned, layout.owned_lengths, output.gather_dim)

        return hook
