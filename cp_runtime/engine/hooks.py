"""Install a plan on a model with hooks around its forward, and remove it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..compat import not_compiled, not_compiled_itself, on_registration
from ..errors import PlanError
from ..nested import rebuild
from .attention.opaque import COMPILING
from .call import Planner, RunningCall
from .plan import AttentionRule, ModulePlan, ShardingPlan, argument_names, argument_positions, find_modules, method_of
from .ranks.mesh import SequenceMesh
from .ranks.profiling import trace_range
from .state import AttentionStreams
from .transforms import ContextParallelInput, ContextParallelOutput, Transform
from .weights.sharded import ShardedWeights

PlanT = TypeVar("PlanT", bound=ShardingPlan)


class InstalledPlan(Generic[PlanT]):
    """A plan installed on a model. Its hooks hand over to the running call; outside of calls they do nothing.

    One call at a time and one thread, as in a worker rank.

    Attributes:
        current: the running call.
        outside: called where a planned module runs outside of calls.
        kept: values that transforms keep between calls, by transform; cleared when the plan is removed.
    """

    def __init__(self, model: nn.Module, plan: PlanT) -> None:
        plan.check(model)
        self.model, self.plan = model, plan
        self.current: RunningCall | None = None
        self.kept: dict[object, Any] = {}
        self.outside: Callable[[], None] = _do_nothing
        self._undo: list[Callable[[], object]] = []
        self._unhook: list[Callable[[], None]] = []
        self._paths: dict[nn.Module, tuple[str, ModulePlan | None]] = {}  # and plans of attending modules
        # `forward` runs the hooks of the model itself: torch would run them outside of `call`.
        self._enter_model: list[Callable[..., Any]] = []
        self._leave_model: list[Callable[..., Any]] = []
        self._attending: set[tuple[type, type]] = set()  # classes of modules, and of what attends in them
        self._missed: dict[tuple[type, type], str] = {}  # in the running call
        self._parents: set[nn.Module] = set()  # of planned modules, and theirs
        self._is_stale = False
        self._install()

    def _install(self) -> None:
        """Put hooks on the modules that the plan's paths lead to."""
        model, plan = self.model, self.plan
        planned = {path for pattern in (*plan.modules, *plan.outputs) for path, _ in find_modules(model, pattern)}
        self._parents = {model.get_submodule(above) for path in planned for above in _paths_above(path)}
        with_attention: set[nn.Module] = set()
        for pattern, module_plan in plan.modules.items():
            for name, module in find_modules(model, pattern):
                if module_plan.when is not None and not module_plan.when(model, name):
                    continue
                if module_plan.attention is not None:
                    with_attention.add(module)
                of_forward = module is not model and method_of(pattern) == "forward"
                # Hooks of attention can be traced; all others break a compiled graph, since they communicate.
                if plan.attention_rule is not None and of_forward and module_plan.only_attention:
                    self._hook_attention(name, module, _constant(module_plan.attention, module_plan.keys), module_plan)
                    continue
                positions = argument_positions(module, method_of(pattern))
                inputs = []  # (keyword, position, transform, location for messages)
                for argument, transform in module_plan.inputs.items():
                    parameter, keyword = argument.partition(".")[::2]
                    inputs.append((keyword or parameter, positions[parameter], transform, f"{name}({argument})"))
                enter, leave = partial(_enter_module, name, module_plan, inputs), partial(_leave_module, name, module_plan)
                self._hook(module, enter, leave, method_of(pattern), on_all=True)
                for local in module_plan.local:
                    for _, inner in find_modules(module, local):
                        self._unhook.append(inner.register_forward_pre_hook(partial(self._at_local, 1)).remove)
                        self._unhook.append(inner.register_forward_hook(partial(self._at_local, -1), prepend=True).remove)
        if plan.attention_rule is not None:
            for name, module in model.named_modules():
                rule = plan.attention_rule(module)
                if rule is not None and module not in with_attention:
                    self._hook_attention(name, module, rule)
        for path, outputs in plan.outputs.items():
            each = [outputs] if isinstance(outputs, ContextParallelOutput) else list(outputs)
            for name, module in find_modules(model, path):
                self._hook(module, None, partial(_complete_output, name, each))

    @contextmanager
    def call(
        self,
        mesh: SequenceMesh,
        planner: Planner,
        on_module: Callable[[], None] | None = None,
        weights: ShardedWeights | None = None,
        kind: Callable[..., RunningCall] = RunningCall,
    ) -> Iterator[RunningCall]:
        """Shard the model while active.

        Args:
            mesh: the ranks that share the sequence.
            planner: decides the degrees of each attention.
            on_module: called on entry to a planned module.
            weights: the model's weights, if they are sharded.
            kind: makes the call.
        """
        if self.current is not None:
            raise PlanError("a sharded call is running already")
        after_attention = weights.after_attention if weights is not None else None
        call = self.current = kind(self.plan, type(self.model).__name__, mesh, planner, on_module, self.kept, after_attention)
        try:
            with trace_range("cp.call"), weights.call() if weights is not None else nullcontext():
                yield call
                self._check_missed()
                call.check_attention()
        finally:
            self.current = None
            self._missed.clear()
            call.close()

    @not_compiled_itself
    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, the model's forward, with this rank's shard of the arguments. Only inside of `call`."""
        for enter in self._enter_model:
            args, kwargs = enter(self.model, args, kwargs) or (args, kwargs)
        out = run(*args, **kwargs)
        for leave in self._leave_model:
            changed = leave(self.model, args, out)
            out = out if changed is None else changed
        return out

    def follow(self) -> None:
        """Have `refresh` find the modules at the plan's paths again where something was put into a module of the model."""
        self.on_remove(on_registration(self, InstalledPlan._note_change))

    def _note_change(self, parent: nn.Module, name: str, value: object) -> None:
        self._is_stale = True
        if self.current is not None and value is not parent._modules.get(name) and parent in self._parents:
            # A forward that runs puts other blocks into its model, as caches do. torch does so itself after this.
            parent._modules[name] = value if isinstance(value, nn.Module) else None
            self._find_again()

    @not_compiled
    def refresh(self) -> bool:
        """Move the hooks to the modules that are at the plan's paths now; return whether they may be others. Raises PlanError if a
        path leads nowhere."""
        is_stale, self._is_stale = self._is_stale, False
        if is_stale:
            self._find_again()
        return is_stale

    def _find_again(self) -> None:
        self.plan.check(self.model)
        self._remove_hooks()
        self._install()

    def remove(self) -> None:
        """Remove the hooks, and call the functions given to `on_remove`."""
        self._remove_hooks()
        while self._undo:
            self._undo.pop()()
        self.kept.clear()

    def _remove_hooks(self) -> None:
        while self._unhook:
            self._unhook.pop()()
        self._enter_model.clear()
        self._leave_model.clear()
        self._paths.clear()

    def on_remove(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def _hook(
        self,
        module: nn.Module,
        enter: Callable[..., Any] | None,
        leave: Callable[..., Any] | None,
        method: str = "forward",
        on_all: bool = False,
    ) -> None:
        """Run functions before and after a module, during calls only. They get the running call, then a torch hook's arguments.

        `on_all`: also while modules get all tokens.
        """
        enter, leave = (hook and self._in_call(hook, on_all) for hook in (enter, leave))
        if method != "forward":
            self._unhook.append(_hook_method(module, method, enter, leave))
            return
        if module is self.model:
            self._enter_model += [not_compiled(enter)] if enter else []
            self._leave_model[:0] = [not_compiled(leave)] if leave else []
            return
        # Not compiled, because they communicate with other ranks.
        if enter is not None:
            self._unhook.append(module.register_forward_pre_hook(not_compiled(enter), with_kwargs=True).remove)
        if leave is not None:
            # In front of existing hooks: the last module entered is the first left, and other hooks see whole outputs.
            self._unhook.append(module.register_forward_hook(not_compiled(leave), prepend=True).remove)

    def _hook_attention(self, name: str, module: nn.Module, rule: AttentionRule, own_plan: ModulePlan | None = None) -> None:
        """Run a rule before a module. `own_plan`: the plan of the module, if that is where the rule comes from."""
        # These hooks are shared by all modules with such arguments, as compiled code is, and find the plan by the module.
        self._paths[module], _plans[module] = (name, own_plan), ref(self)
        before, after = _attention_hooks(argument_names(module), rule, own_plan is not None)
        self._unhook.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._unhook.append(module.register_forward_hook(after, prepend=True).remove)

    def enter_attention(self, rule: AttentionRule, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Enter the candidate streams of a module's attention, in calls only."""
        if self.current is None:
            return
        scope, (path, own_plan) = self.current.scope, self._paths[module]
        if own_plan is not None:
            self.current.enter_module(path, own_plan)
        elif scope.derived:
            self.current.enter_scope(rule(arguments), derived=True, name=path)
        else:
            self.current.enter_scope(scope.streams, name=path, by_plan=scope.by_plan)

    def leave_attention(self, module: nn.Module) -> None:
        """Leave a module that attends. Note whether its attention was shared, or had to be and was not."""
        call = self.current
        if call is None:
            return
        path, own_plan = self._paths[module]
        by = getattr(module, "processor", module)
        if call.has_attended:
            self._attending.add((type(module), type(by)))
        elif own_plan is None and not call.attention_is_local:
            self._missed.setdefault((type(module), type(by)), path)
        call.leave_scope()

    def _check_missed(self) -> None:
        """Raise PlanError if modules attended out of reach: those of a kind of which none has ever attended through torch's
        function. Others left their attention out on purpose, such as for a step cache, or for guidance by skipped layers."""
        missed, self._missed = self._missed, {}
        for (kind, by), path in missed.items():
            if (kind, by) not in self._attending:
                raise PlanError(
                    f"{path} ({kind.__name__}) did not attend through torch's scaled_dot_product_attention, but by {by.__name__}, "
                    "so its attention was not shared. Use the class's own processor, and the attention backend "
                    '"native": model.set_attention_backend("native").'
                )

    def _in_call(self, hook: Callable[..., Any], on_all: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            if self.current is None:
                return self.outside()
            return None if self.current.state.on_all and not on_all else hook(self.current, *given)

        return run

    def _at_local(self, step: int, *_: Any) -> None:
        """Enter (1) or leave (-1) a module whose attention is local by the plan."""
        if COMPILING.in_block and torch.compiler.is_compiling():  # traced code must not look at the call
            COMPILING.local += step
        else:
            self._at_local_now(step)

    @not_compiled
    def _at_local_now(self, step: int) -> None:
        if self.current is not None and step > 0:
            self.current.enter_scope(())
        elif self.current is not None:
            self.current.leave_scope()


def _do_nothing() -> None: ...


def _paths_above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


_plans: WeakKeyDictionary[nn.Module, ref[InstalledPlan[Any]]] = WeakKeyDictionary()
"""Modules that attend -> the plan installed on their model."""


@cache
def _attention_hooks(names: tuple[str, ...], rule: AttentionRule, by_plan: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks of modules with these arguments: the same ones for all, as blocks share compiled code.

    Traced code must not look at the call: there the rule's result goes with the operator of the attention.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if torch.compiler.is_compiling():
            COMPILING.scopes.append(encode_streams(rule(arguments), by_plan))
        else:
            _enter_attention(rule, module, arguments)

    def after(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            COMPILING.scopes.pop()
        else:
            _leave_attention(module)

    return before, after


def _plan_of(module: nn.Module) -> InstalledPlan[Any] | None:
    """Return the plan that a module is in; None for a copy of one, which has its hooks."""
    plan = _plans.get(module)
    return None if plan is None else plan()


@not_compiled
def _enter_attention(rule: AttentionRule, module: nn.Module, arguments: Mapping[str, Any]) -> None:
    if (plan := _plan_of(module)) is not None:
        plan.enter_attention(rule, module, arguments)


@not_compiled
def _leave_attention(module: nn.Module) -> None:
    if (plan := _plan_of(module)) is not None:
        plan.leave_attention(module)


@cache
def _constant(attention: tuple[str, ...] | None, keys: tuple[str, ...] | None) -> AttentionRule:
    """Return the rule of a module whose plan names its streams: the same object for the same names."""
    streams = [(tuple(attention), tuple(keys or attention))] if attention else []
    return lambda _: streams


def encode_streams(streams: Sequence[AttentionStreams], by_plan: bool = False) -> str:
    """Return what an attention may be over as text, which an operator takes; never empty. `by_plan`: the plan names it."""
    return ("!" if by_plan else ";") + ";".join(["+".join(queries) + ">" + "+".join(keys) for queries, keys in streams])


def decode_streams(text: str) -> tuple[bool, list[AttentionStreams]]:
    """Invert `encode_streams`."""
    split = [pair.partition(">")[::2] for pair in text[1:].split(";") if pair]
    pairs = [(tuple(filter(None, queries.split("+"))), tuple(filter(None, keys.split("+")))) for queries, keys in split]
    return text.startswith("!"), pairs


def _enter_module(
    name: str,
    plan: ModulePlan,
    inputs: Sequence[tuple[str, int, Transform, str]],
    call: RunningCall,
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    blocks = call.blocks if call.state.on_all and plan.is_block else None
    if blocks is not None:
        blocks.enter(name, (args, kwargs))
    values, named = list(args), dict(kwargs)
    if not call.state.on_all:
        call.enter_module(name, plan)
    for keyword, position, transform, where in inputs:
        if keyword in named:
            named[keyword] = call.local(transform, named[keyword], where)
        elif position < len(values):
            values[position] = call.local(transform, values[position], where)
    if call.state.on_all:  # that was for the lengths of streams, which a plan may have from this module
        return args, kwargs
    if blocks is not None and not plan.names_tokens:
        planned = {name for keyword, position, *_ in inputs for name in (keyword, position)}
        values = [each if place in planned else blocks.split(each, plan) for place, each in enumerate(values)]
        named = {name: each if name in planned else blocks.split(each, plan) for name, each in named.items()}
    return tuple(values), named


def _leave_module(name: str, plan: ModulePlan, call: RunningCall, _: nn.Module, __: Any, value: Any) -> Any:
    if (blocks := call.entered.get(name)) is not None and not call.state.on_all:
        value = blocks.leave(name, value)  # from here on, all tokens
        call.leave_module(plan)
        return value
    if not call.state.on_all:
        call.leave_module(plan)
    if not plan.outputs:
        return None
    changes = {i: partial(call.local, split, where=f"{name} output {i}") for i, split in plan.outputs.items()}
    # Other transforms may handle other objects that hold tokens.
    of_tensors = any(isinstance(split, ContextParallelInput) for split in plan.outputs.values())
    changed = _map_outputs(value, changes, name, of_tensors)
    return None if call.state.on_all else changed


def _complete_output(
    name: str, outputs: Sequence[ContextParallelOutput | None], call: RunningCall, _: nn.Module, __: Any, value: Any
) -> Any:
    due = [(i, output) for i, output in enumerate(outputs) if output and (output.when is None or output.when(call.state))]
    return _map_outputs(value, {i: partial(call.whole_output, name, output) for i, output in due}, name)


def _map_outputs(value: Any, changes: Mapping[int, Callable[[Any], Any]], name: str, of_tensors: bool = True) -> Any:
    """Apply functions to some outputs of a module. It returns a single value, a tensor if `of_tensors`, or several values."""
    if not changes:
        return None
    single = not isinstance(value, (tuple, list))
    if single and of_tensors and not isinstance(value, Tensor):
        raise PlanError(
            f"{name}: expected a tensor or a tuple of tensors, got {type(value).__name__}. Plan another module's output."
        )
    value = [value] if single else value
    if max(changes) >= len(value):
        raise PlanError(f"{name}: the plan speaks of output {max(changes)}, the module returned {len(value)}. Correct the plan.")
    changed = [changes[i](item) if i in changes else item for i, item in enumerate(value)]
    return changed[0] if single else rebuild(value, changed)


def _hook_method(
    module: nn.Module, method: str, enter: Callable[..., Any] | None, leave: Callable[..., Any] | None
) -> Callable[[], None]:
    """Run functions before and after a method, inside the module's hooks; return the function that undoes it.

    torch runs a module's hooks, such as those that gather sharded weights, around `forward` only: the method stands in for it.
    """
    stock: Callable[..., Any] = getattr(module, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = (enter and enter(module, args, kwargs)) or (args, kwargs)
        own = vars(module).get("forward")
        module.forward = stock
        try:
            out = module(*args, **kwargs)
        finally:
            del module.forward
            if own is not None:
                module.forward = own
        changed = leave(module, args, out) if leave else None
        return out if changed is None else changed

    setattr(module, method, run)
    return partial(delattr, module, method)
