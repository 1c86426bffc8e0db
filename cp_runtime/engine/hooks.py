"""Apply a plan to a module with hooks over its own forward, and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import PlanError, UnknownStreamError
from ..nested import rebuild
from .attention.context_parallel import Attend, context_parallel_attention
from .config import ContextParallelConfig
from .cost import AttentionShape
from .mesh import SequenceMesh
from .plan import AttentionRule, ModulePlan, ShardingPlan, argument_names, find_modules
from .sharding import JointLayout
from .state import AttentionStreams, CallState
from .transforms import ContextParallelOutput, Transform

PlanT = TypeVar("PlanT", bound=ShardingPlan)


class AppliedPlan(Generic[PlanT]):
    """A plan on a model. Outside of `call` the model behaves as if no plan were there.

    One call at a time and one thread, as in a worker rank.

    Args:
        model: the module the plan was written for.
        plan: what to split and gather.
        mesh: the ranks that share the sequence.
        config_for: degrees and method of an attention.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlanT,
        mesh: SequenceMesh,
        config_for: Callable[[AttentionShape], ContextParallelConfig] | None = None,
    ) -> None:
        plan.check(model)
        self.model, self.plan, self.mesh = model, plan, mesh
        self.config_for = config_for
        self.on_module: Callable[[], None] | None = None
        self._state: CallState | None = None
        self._attention: list[Sequence[AttentionStreams]] = []
        self._attended = 0
        self._undo: list[Callable[[], None]] = []
        # Whether the plan shares attention at all. If it does and a call shares none, attention was out of reach.
        self._shares = bool(plan.attention) or any(module_plan.attention for module_plan in plan.modules.values())
        # The model's own arguments and outputs are split and gathered inside `call`, by `forward`: hooks would run outside.
        self._enter_root: list[Callable[..., Any]] = []
        self._leave_root: list[Callable[..., Any]] = []
        said: set[nn.Module] = set()
        for pattern, module_plan in plan.modules.items():
            for name, module in find_modules(model, pattern):
                if module_plan.when is not None and not module_plan.when(model, name):
                    continue
                said.update([module] if module_plan.attention is not None else [])
                self._add(module, self._enter(name, module, module_plan), self._leave(name, module_plan))
                for local in module_plan.local:
                    for _, inner in find_modules(module, local):
                        self._add(inner, self._enter_local, self._leave_local)
        if plan.attention_rule is not None:
            for name, module in model.named_modules():
                rule = plan.attention_rule(module)
                if rule is not None and module not in said:
                    self._add(module, *self._around_attention(name, module, rule))
        for path, outputs in plan.outputs.items():
            for name, module in find_modules(model, path):
                self._add(module, None, self._gather(name, outputs))

    @property
    def state(self) -> CallState:
        """State of the running call."""
        if self._state is None:
            raise PlanError("no sharded call is running")
        return self._state

    @property
    def attention_is_local(self) -> bool:
        """Whether attention at this point of the forward needs no communication."""
        streams = self._attention[-1] if self._attention and self.mesh.size > 1 else ()
        return not any(self._known(candidate) for candidate in streams)

    @contextmanager
    def call(self, on_module: Callable[[], None] | None = None) -> Iterator[CallState]:
        """Shard what runs inside. `on_module` is called whenever a planned module is entered."""
        if self._state is not None:
            raise PlanError("a sharded call is running already")
        self._state = CallState(self.mesh.rank, self.mesh.size, self.gather)
        self._attention.append(self.plan.attention)
        self.on_module = on_module
        before = self._attended
        try:
            yield self._state
            if self._shares and self.mesh.size > 1 and self._state.lengths and self._attended == before:
                raise PlanError(
                    f"{type(self.model).__name__}: tokens were split, but no attention was shared. Attention must go through "
                    "torch's scaled_dot_product_attention, or ComfyUI's optimized_attention: matrix products and other libraries "
                    "are out of reach."
                )
        finally:
            self._state, self.on_module = None, None
            self._attention.clear()

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, the model's own forward, with this rank's part of the model's arguments. Inside of `call`."""
        for enter in self._enter_root:
            args, kwargs = enter(self.model, args, kwargs) or (args, kwargs)
        out = run(*args, **kwargs)
        for leave in self._leave_root:
            changed = leave(self.model, args, out)
            out = out if changed is None else changed
        return out

    def attend(
        self,
        q_BLHD: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        attend: Attend | None = None,
        kernel: str | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attention at this point of the forward, over the tokens of all ranks. See `context_parallel_attention`."""
        self._attended += 1
        q_layout, k_layout = self._layouts(q_BLHD.shape[1], k_BLKD.shape[1], mask)
        B, _, H, D = q_BLHD.shape
        shape = AttentionShape(B, q_layout.total, k_layout.total, H, k_BLKD.shape[2], D, q_BLHD.element_size())
        if self.config_for is None:
            raise PlanError("the plan was applied without a config")
        if causal:
            mask = self.state.once("causal", q_layout, lambda: q_BLHD.new_ones(q_layout.total, k_layout.total).tril().bool())
        return context_parallel_attention(
            q_BLHD, k_BLKD, v_BLKD, mesh=self.mesh, config=self.config_for(shape), q_layout=q_layout, k_layout=k_layout, mask=mask,
            scale=scale, attend=attend, kernel=kernel, once=self.state.once,
        )  # fmt: skip

    def gather(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """The tokens of all ranks, given this rank's tokens of a stream along `dim`."""
        return self._gathered(type(self.model).__name__, ContextParallelOutput(dim, stream=stream), value)

    def remove(self) -> None:
        """Take everything off."""
        while self._undo:
            self._undo.pop()()
        self._enter_root.clear()
        self._leave_root.clear()

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Have something undone by `remove`."""
        self._undo.append(undo)

    def _add(self, module: nn.Module, enter: Callable[..., Any] | None, leave: Callable[..., Any] | None) -> None:
        if module is self.model:
            self._enter_root += [enter] if enter else []
            self._leave_root[:0] = [leave] if leave else []
            return
        if enter is not None:
            self._undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        if leave is not None:
            # In front of the hooks that are there: what was entered last is left first, and other hooks see whole outputs.
            self._undo.append(module.register_forward_hook(leave, prepend=True).remove)

    def _known(self, streams: AttentionStreams) -> bool:
        return all(name in self.state.lengths for side in streams for name in side)

    def _layouts(self, queries: int, keys: int, mask: Tensor | None) -> tuple[JointLayout, JointLayout]:
        """Layouts of queries and keys, given how many of each this rank has."""
        state = self.state
        if id(mask) in state.masked:
            _, (q, k) = state.masked[id(mask)]
            return state.layout(q), state.layout(k)
        candidates = [(state.layout(q), state.layout(k)) for q, k in filter(self._known, self._attention[-1])]
        if len(candidates) == 1:
            return candidates[0]
        held = (queries, keys)
        fitting = {pair for pair in candidates if tuple(layout.local_lengths[state.rank] for layout in pair) == held}
        if len(fitting) == 1:
            return fitting.pop()
        streams = ", ".join(f"{name} {length}" for name, length in state.lengths.items())
        raise PlanError(
            f"attention with {queries} queries and {keys} keys on rank {state.rank} fits {len(fitting)} combinations of the "
            f"streams ({streams}). Say in the plan what the module attends to: ModulePlan(attention=(...)), or attention=() where "
            "keys and values are replicated."
        )

    def _enter(self, name: str, module: nn.Module, plan: ModulePlan) -> Callable[..., Any]:
        positions = {argument: i for i, argument in enumerate(argument_names(module))}

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if self._state is None:
                return None
            if self.on_module is not None:
                self.on_module()
            if plan.separate:
                self._state.begin()
            values, named = list(args), dict(kwargs)
            for argument, transform in plan.inputs.items():
                parameter, keyword = argument.partition(".")[::2]
                where, position = f"{name}({argument})", positions[parameter]
                if (keyword or parameter) in named:
                    named[keyword or parameter] = self._local(transform, named[keyword or parameter], where)
                elif position < len(values):
                    values[position] = self._local(transform, values[position], where)
            streams = [(plan.attention, plan.keys or plan.attention)] if plan.attention else ()
            self._push(self._attention[-1] if plan.attention is None else streams)
            return tuple(values), named

        return hook

    def _leave(self, name: str, plan: ModulePlan) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, value: Any) -> Any:
            if self._state is None:
                return None
            self._attention.pop()
            if plan.separate:
                self._state.end()
            changes = {i: partial(self._local, split, where=f"{name} output {i}") for i, split in plan.outputs.items()}
            return _map_outputs(value, changes, name)

        return hook

    def _local(self, transform: Transform, value: Any, where: str) -> Any:
        """This rank's value. While nothing was split, since a patch skipped the blocks where that begins, it is the whole one."""
        try:
            return transform(self.state, value, where)
        except UnknownStreamError:
            if self.state.lengths:
                raise
            return value

    def _push(self, streams: Sequence[AttentionStreams]) -> None:
        self._attention.append(streams)

    def _enter_local(self, *_: Any) -> None:
        if self._state is not None:
            self._push(())

    def _leave_local(self, *_: Any) -> None:
        if self._state is not None:
            self._attention.pop()

    def _around_attention(self, name: str, module: nn.Module, rule: AttentionRule) -> tuple[Callable[..., Any], Callable[..., Any]]:
        names = argument_names(module)
        counts: list[int] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._state is not None:
                counts.append(self._attended)
                self._push(rule({**dict(zip(names, args, strict=False)), **kwargs}) if self._attention[-1] else ())

        def leave(*_: Any) -> None:
            if self._state is None:
                return
            shared = not self.attention_is_local
            self._attention.pop()
            if counts.pop() == self._attended and shared:
                raise PlanError(
                    f"{name} ({type(module).__name__}) did not attend through torch's scaled_dot_product_attention, so its "
                    'attention was not shared. Use the attention backend "native": model.set_attention_backend("native").'
                )

        return enter, leave

    def _gather(self, name: str, outputs: ContextParallelOutput | Sequence[ContextParallelOutput | None]) -> Callable[..., Any]:
        each = [outputs] if isinstance(outputs, ContextParallelOutput) else list(outputs)

        def hook(_: nn.Module, __: Any, value: Any) -> Any:
            if self._state is None:
                return None
            due = [(i, o) for i, o in enumerate(each) if o and (o.when is None or o.when(self._state))]
            changes = {i: partial(self._gathered, name, output) for i, output in due}
            for _i, output in due:
                self.state.gathered.update([output.stream] if isinstance(output.stream, str) else output.stream or ())
            return _map_outputs(value, changes, name)

        return hook

    def _gathered(self, name: str, output: ContextParallelOutput, value: Tensor) -> Tensor:
        if output.expected_dims is not None and value.ndim != output.expected_dims:
            raise PlanError(f"{name}: expected an output of {output.expected_dims} dimensions, got {tuple(value.shape)}")
        if output.stream is None:
            raise PlanError(f"{name}: the plan does not say which stream is gathered. Set ContextParallelOutput(stream=...).")
        if not self.state.lengths:  # nothing was split
            return value
        if output.within:
            sizes = [self.state.layout((s,)).local_lengths[self.state.rank] for s in output.within]
            parts, place = list(value.split(sizes, output.gather_dim)), output.within.index(str(output.stream))
            parts[place] = self._gathered(name, replace(output, within=()), parts[place])
            return torch.cat(parts, output.gather_dim)
        streams = (output.stream,) if isinstance(output.stream, str) else output.stream
        layout, rank, dim = self.state.layout(streams), self.state.rank, output.gather_dim
        grid = self.state.grids.get(streams[0])
        if grid is not None:
            value = value.flatten(dim, dim + 2)
        if value.shape[dim] != layout.local_lengths[rank]:
            raise PlanError(
                f"{name}: dimension {dim} of the output {tuple(value.shape)} is not this rank's "
                f"{layout.local_lengths[rank]} tokens of {' and '.join(streams)}"
            )
        owned = layout.owned_positions(rank)
        if owned is not None:
            value = value.index_select(dim, owned.to(value.device))
        (whole,) = self.mesh.whole.all_gather([value], layout.owned_lengths, dim)
        whole = layout.to_joint(whole, dim).contiguous()  # models may go on with a view
        return whole if grid is None else whole.unflatten(dim, grid)


def _map_outputs(value: Any, changes: Mapping[int, Callable[[Any], Any]], name: str) -> Any:
    """Apply a function to some outputs of a module that returns a tensor, or a tuple or list of values."""
    if not changes:
        return None
    if isinstance(value, Tensor):
        value, single = [value], True
    elif isinstance(value, (tuple, list)):
        single = False
    else:
        raise PlanError(
            f"{name}: expected a tensor or a tuple of tensors, got {type(value).__name__}. Plan another module's output."
        )
    if max(changes) >= len(value):
        raise PlanError(f"{name}: the plan speaks of output {max(changes)}, the module returned {len(value)}. Correct the plan.")
    changed = [changes[i](item) if i in changes else item for i, item in enumerate(value)]
    return changed[0] if single else rebuild(value, changed)
