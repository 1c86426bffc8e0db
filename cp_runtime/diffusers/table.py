"""Plans in diffusers' form: `{module path: {argument or output index: ContextParallelInput} | ContextParallelOutput}`.

They name no streams. Here every split argument becomes a separate stream, named after the argument. A single stream attends to
itself. With several, the arguments of diffusers' attention modules reveal the streams of the keys, and `known` holds the order in
which a class joins them. For any other class with several streams, the table needs a `ModulePlan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from ..engine.plan import AttentionRule, ModulePlan, ShardingPlan, argument_names, find_modules
from ..engine.state import AttentionStreams
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from ..errors import PlanError
from ..nested import rebuild
from .known import ENCODER, HIDDEN, known

NAMED = ("the plan: ", "Correct the plan.")  # prefix and remedy if a module is missing
TOKENS = (None, 3)  # `expected_dims` of possible tokens


def plan_from_table(module: nn.Module, table: Mapping[str, Any]) -> ShardingPlan:
    """Convert a table. Raises PlanError if an entry is of an unknown kind, or the stream of an output is ambiguous."""
    modules: dict[str, ModulePlan] = {}
    outputs: dict[str, Any] = {}
    for path, entry in table.items():
        if isinstance(entry, ModulePlan):
            modules[path] = entry
        elif isinstance(entry, Mapping):
            modules[path] = _module_plan(path, entry)
        else:
            outputs[path] = entry
    gathered = {inner for path in outputs for _, inner in find_modules(module, path, *NAMED)}
    for path, plan in modules.items():
        if path and _defines_tokens(plan) and gathered.intersection(inner for _, inner in find_modules(module, path, *NAMED)):
            modules[path] = replace(plan, separate=True)
    streams = _streams(_arguments(modules))
    if not streams:
        modules = {path: _with_streams(path, plan) for path, plan in modules.items()}
        streams = _streams(_items_and_outputs(modules))
    named = {*streams, *(name for split in _arguments(modules) for name in split.streams or ())}
    found = known(module)
    order = None if found is None else found.order
    if order is None and len(streams) > 1 and not any(plan.attention is not None for plan in modules.values()):
        raise PlanError(
            f"the plan splits {' and '.join(streams)}, and does not say in which order {type(module).__name__} joins them for "
            "attention. Say it for the modules that attend: {their path: ModulePlan(attention=("
            + ", ".join(map(repr, streams))
            + "))}, or in another order; attention=() where keys and values are whole on every rank."
        )
    return ShardingPlan(
        modules=modules,
        outputs={path: _outputs(path, entry, streams, named) for path, entry in outputs.items()},
        attention=_self_attention(streams, order),
        attention_rule=lambda inner: _rule(tuple(streams), order or ()) if HIDDEN in streams and _attends(inner) else None,
    )


def _module_plan(path: str, entry: Mapping[str | int, Any]) -> ModulePlan:
    inputs: dict[str, Any] = {}
    outputs: dict[int, ContextParallelInput] = {}
    for key, value in entry.items():
        if isinstance(value, (list, tuple)):
            inputs[str(key)] = _Each(tuple(_input(path, key, item, f"{key}[{i}]") for i, item in enumerate(value)))
        elif isinstance(key, int):
            outputs[key] = _input(path, key, value, "")
        else:
            inputs[key] = _input(path, key, value, key)
    return ModulePlan(inputs=inputs, outputs=outputs, attention=None)


class _Each:
    """One transform for each item of a list argument."""

    def __init__(self, transforms: tuple[ContextParallelInput, ...]) -> None:
        self.transforms = transforms

    def __call__(self, state: Any, value: Any, where: str) -> Any:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != len(self.transforms):
            got = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
            raise PlanError(f"{where}: the plan has {len(self.transforms)} entries, the argument {got}. Correct the plan.")
        return rebuild(value, [split(state, item, where) for split, item in zip(self.transforms, value, strict=True)])


def _input(path: str, key: str | int, value: Any, stream: str) -> ContextParallelInput:
    """Convert an entry, of this package or of diffusers, to this package's class."""
    try:
        split_output = bool(value.split_output)
        made = ContextParallelInput(value.split_dim, value.expected_dims, split_output, streams=None if split_output else (stream,))
    except AttributeError:
        raise PlanError(
            f"plan entry {path!r}[{key!r}]: got {type(value).__name__}; allowed: ContextParallelInput, or a list of them. "
            "Correct the plan."
        ) from None
    if split_output is not isinstance(key, int):
        raise PlanError(
            f"plan entry {path!r}[{key!r}]: split_output={split_output}; allowed: an output is named by its index with "
            "split_output=True, an argument by its name with split_output=False. Correct the plan."
        )
    if not isinstance(value, ContextParallelInput):
        return made
    if value.side and value.streams is None:
        raise PlanError(
            f"plan entry {path!r}[{key!r}]: got side=True without streams; allowed: the streams whose tokens it speaks about. Say "
            'them: streams=("hidden_states",).'
        )
    return value if split_output else replace(value, streams=value.streams or (stream,))


def _outputs(path: str, entry: Any, streams: Sequence[str], named: set[str]) -> list[ContextParallelOutput | None]:
    made: list[ContextParallelOutput | None] = []
    for value in entry if isinstance(entry, (list, tuple)) else [entry]:
        if value is None:
            made.append(None)
            continue
        if not hasattr(value, "gather_dim"):
            raise PlanError(
                f"plan entry {path!r}: got {type(value).__name__}; allowed: ContextParallelOutput, a list of them, ModulePlan, or "
                "a dict of ContextParallelInput. Correct the plan."
            )
        stream = getattr(value, "stream", None)
        if stream is None:
            stream = HIDDEN if HIDDEN in streams else streams[0] if len(streams) == 1 else None
        if not named.issuperset((stream,) if stream is None or isinstance(stream, str) else stream):
            raise PlanError(
                f"plan entry {path!r}: which of {', '.join(streams) or 'no streams'} is gathered there? Say it: "
                "ContextParallelOutput(..., stream=...)."
            )
        ours = isinstance(value, ContextParallelOutput)
        made.append(replace(value if ours else ContextParallelOutput(value.gather_dim, value.expected_dims), stream=stream))
    return made


def _defines_tokens(plan: ModulePlan) -> bool:
    return any(not getattr(split, "side", False) for split in plan.inputs.values())


def _arguments(modules: Mapping[str, ModulePlan]) -> Sequence[ContextParallelInput]:
    """Return the splits of all arguments that are not lists."""
    return [split for plan in modules.values() for split in plan.inputs.values() if isinstance(split, ContextParallelInput)]


def _items_and_outputs(modules: Mapping[str, ModulePlan]) -> Sequence[ContextParallelInput]:
    """Return the splits of list items and of outputs. They are the tokens in a table without other streams."""
    found: list[ContextParallelInput] = []
    for plan in modules.values():
        found += [split for each in plan.inputs.values() if isinstance(each, _Each) for split in each.transforms]
        found += [split for split in plan.outputs.values() if isinstance(split, ContextParallelInput)]
    return found


def _with_streams(path: str, plan: ModulePlan) -> ModulePlan:
    """Return the plan with a stream for every split output, named after module and index."""
    outputs = dict(plan.outputs)
    for i, split in outputs.items():
        if isinstance(split, ContextParallelInput) and split.expected_dims in TOKENS:
            outputs[i] = replace(split, streams=split.streams or (f"{path}[{i}]",))
    return replace(plan, outputs=outputs)


def _streams(splits: Sequence[ContextParallelInput]) -> tuple[str, ...]:
    """Return the streams of tokens `[B, L, channels]` in the order of the plan. Their joint order only shows in the forward."""
    names: dict[str, None] = {}
    for split in splits:
        if not split.side and split.expected_dims in TOKENS:
            names.update(dict.fromkeys(split.streams or ()))
    return tuple(names)


def _self_attention(streams: Sequence[str], order: Sequence[str] | None) -> list[AttentionStreams]:
    """Return the candidate streams of self-attention: each stream alone, or all together. Empty if their order is unknown."""
    if order is None and len(streams) > 1:
        return []
    together = tuple(name for name in order or () if name in streams)
    return [(names, names) for names in dict.fromkeys([together, *((name,) for name in streams)]) if names]


def _attends(module: nn.Module) -> bool:
    """Return whether a module is one of diffusers' attention modules, whose arguments show whose keys they use."""
    return hasattr(module, "processor") and ENCODER in argument_names(module)


@cache
def _rule(streams: tuple[str, ...], order: tuple[str, ...]) -> AttentionRule:
    """Return what a diffusers attention module attends to (joint, cross or self), given its arguments. The same object for the same
    streams: compiled code is shared by it."""
    joint = tuple(name for name in order if name in streams)
    # Not of text alone: its number of tokens does not distinguish it from the image on every rank.
    alone = [(names, names) for names in dict.fromkeys([joint, (HIDDEN,)]) if names]

    def rule(arguments: Mapping[str, Any]) -> Sequence[AttentionStreams]:
        context = arguments.get(ENCODER)
        if context is None or context is arguments.get(HIDDEN):
            return alone
        if order:  # queries of the image alone are for an image prompt, such as IP-Adapter's, which every rank has whole
            return [(joint, joint), ((HIDDEN,), ())]
        return [((HIDDEN,), (ENCODER,))] if ENCODER in streams else ()  # or every rank has the text

    return rule
