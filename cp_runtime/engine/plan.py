"""Sharding plans: data that says which arguments of which modules are split, and which outputs are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn

from ..errors import PlanError
from .state import AttentionStreams
from .transforms import ContextParallelInput, ContextParallelOutput, Transform, check_names

# Arguments of a module's forward -> candidate streams of the attention inside it; empty = no communication.
AttentionRule = Callable[[Mapping[str, Any]], Sequence[AttentionStreams]]

NAMED_BY_WRAPPERS = 2  # arguments in front of *args, at most: layers of PEFT have one, blocks of cache-dit two


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """Sharding of a module, or of every module that a pattern with one `*` matches.

    Args:
        inputs: argument name -> transform. Arguments that define a stream come before those that use it. An argument taken by
            `**name` is written "name.argument".
        outputs: index of an output -> its split.
        attention: streams of the self-attention inside the module, in joint order; empty = no communication inside; None = the same
            as around the module. Outside of all modules there is none unless the plan says so.
        keys: streams of the keys and values, if they differ from those of the queries.
        local: submodules, relative to the module, whose attention needs no communication (replicated keys and values).
        separate: the module splits its inputs and gathers its output by itself: its streams have their own lengths.
        when: (model, path of a matching module) -> whether the plan applies to it; None = always.
    """

    inputs: Mapping[str, Transform] = field(default_factory=dict)
    outputs: Mapping[int, Transform] = field(default_factory=dict)
    attention: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    local: tuple[str, ...] = ()
    separate: bool = False
    when: Callable[[nn.Module, str], bool] | None = None

    @property
    def only_attention(self) -> bool:
        """Whether the plan names the streams of attention, and nothing else."""
        return self.attention is not None and not (self.inputs or self.outputs or self.local or self.separate or self.when)

    @property
    def names_tokens(self) -> bool:
        """Whether the plan says which arguments are tokens."""
        return any(isinstance(each, ContextParallelInput) and not each.side for each in self.inputs.values())

    @property
    def is_block(self) -> bool:
        """Whether the module computes with the tokens of all ranks."""
        return bool(self.attention) or self.names_tokens

    def __post_init__(self) -> None:
        check_names(self, "attention", "keys", "local")


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Sharding of a model that keeps its own forward.

    Args:
        modules: pattern -> plan of those modules; "" is the model itself, "pattern:method" modules in calls of another method than
            `forward`.
        outputs: module path -> which stream is gathered from its output, or from each of its outputs (None = left alone).
        attention: candidate streams of attention outside of all planned modules, once the length of one is known.
        attention_rule: for modules whose attention depends on their arguments: module -> rule, or None.
    """

    modules: Mapping[str, ModulePlan]
    outputs: Mapping[str, ContextParallelOutput | Sequence[ContextParallelOutput | None]]
    attention: Sequence[AttentionStreams] = ()
    attention_rule: Callable[[nn.Module], AttentionRule | None] | None = None

    @property
    def shares_attention(self) -> bool:
        """Whether any attention is shared. If so, a call that splits tokens but shares no attention has missed it."""
        return bool(self.attention) or any(plan.attention for plan in self.modules.values())

    @property
    def origin(self) -> str:
        """The origin of this plan, for messages."""
        return "the plan"

    @property
    def remedy(self) -> str:
        """Advice for a plan that does not fit, for messages."""
        return "Correct the plan."

    def check(self, model: nn.Module) -> None:
        """Raise PlanError unless every module and argument that the plan relies on exists in `model`."""
        for pattern, plan in self.modules.items():
            for name, module in find_modules(model, pattern, f"{self.origin}: ", self.remedy):
                if plan.when is not None and not plan.when(model, name):
                    continue
                method = method_of(pattern)
                if not hasattr(module, method):
                    raise PlanError(f"{self.origin}: {name} ({type(module).__name__}) has no method {method!r}. {self.remedy}")
                parameters = argument_positions(module, method)
                for argument in plan.inputs:
                    if argument.partition(".")[0] not in parameters:
                        raise PlanError(
                            f"{self.origin}: {name or 'the module'} ({type(module).__name__}) has no argument {argument!r}; "
                            f"it has {', '.join(parameters)}. {self.remedy}"
                        )
                for local in plan.local:
                    find_modules(module, local, f"{self.origin}: {name}.", self.remedy)
        for path in self.outputs:
            find_modules(model, path, f"{self.origin}: ", self.remedy)


def find_modules(root: nn.Module, pattern: str, prefix: str = "", remedy: str = "") -> Sequence[tuple[str, nn.Module]]:
    """Return (path, module) of every module that `pattern` names; `*` stands for one path component, `-1` for the last of a list.

    A component `name?` is optional: some models of a class lack it.

    Raises:
        PlanError: there is none.
    """
    found: list[tuple[str, nn.Module]] = [("", root)]
    pattern = pattern.partition(":")[0]
    for component in pattern.split(".") if pattern else ():
        part = component.removesuffix("?")
        found = [(f"{path}.{name}".lstrip("."), inner) for path, module in found for name, inner in _inside(module, part)]
        if not found and part != component:
            return []
    unique: dict[nn.Module, str] = {}  # a list may hold a module several times
    for path, module in found:
        unique.setdefault(module, path)
    if not found:
        there = dict(root.named_modules()).get(pattern.removesuffix(".*"))
        if not (isinstance(there, nn.ModuleList) and len(there) == 0):  # some models have no blocks of one kind
            raise PlanError(f"{prefix}no module {pattern!r} in {type(root).__name__}. {remedy}".rstrip())
    return [(path, module) for module, path in unique.items()]


def _inside(module: nn.Module, part: str) -> list[tuple[str, nn.Module]]:
    """Return the children of a module that one component of a pattern matches, and with `*` what they wrap if that is a list."""
    children = module._modules
    names = [*children] if part == "*" else [name for name in [*children][-1:] if name.isdigit()] if part == "-1" else [part]
    found = [(name, child) for name in names if (child := children.get(name)) is not None]
    if part == "*":
        several = [(f"{name}.{inner}", each) for name, child in found for inner, each in wrapped_modules(child) if "." in inner]
        return found + several
    wrapped = [] if found else wrapped_modules(module)[:1]
    return found + [(f"{name}.{inner}", each) for name, one in wrapped for inner, each in _inside(one, part)]


def wrapped_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what a wrapper runs with its own arguments: a module, as layers of PEFT do, or those of a list, as caches do."""
    forward = type(module).forward
    others = next((at for at, name in enumerate(_argument_names(forward)) if name.endswith("[0]")), NAMED_BY_WRAPPERS + 1)
    if forward is nn.Module.forward or others > NAMED_BY_WRAPPERS:
        return []
    # Some have the whole model beside what they wrap.
    name, child = next(((name, each) for name, each in module.named_children() if module not in {*each.modules()}), ("", None))
    if isinstance(child, nn.ModuleList):
        return [(f"{name}.{number}", each) for number, each in child.named_children()]
    return [] if child is None else [(name, child)]


def method_of(pattern: str) -> str:
    """Return the method in a plan's pattern."""
    return pattern.partition(":")[2] or "forward"


def argument_names(module: nn.Module, method: str = "forward") -> tuple[str, ...]:
    """Return the argument names of a module's method, in order and without `self`; those of `*args` are `args[0]` and so on."""
    return _argument_names(getattr(type(module), method))


def argument_positions(module: nn.Module, method: str = "forward") -> dict[str, int]:
    """Return the position of each argument of a module's method, by name. Those of a wrapped module count, too."""
    own = {name: place for place, name in enumerate(argument_names(module, method))}
    inner = [each for _, each in wrapped_modules(module)[:1] if hasattr(each, method)]
    return argument_positions(inner[0], method) | own if inner else own


@lru_cache(maxsize=1024)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    names: list[str] = []
    for name, parameter in list(inspect.signature(forward).parameters.items())[1:]:
        # The class does not say how many there are: more than plans name.
        names += [f"{name}[{i}]" for i in range(8)] if parameter.kind is parameter.VAR_POSITIONAL else [name]
    return tuple(names)
