"""Drafts the table of a model family from recordings of its forward, for `make plan`.

What lengths and values show goes into the table: block lists, streams and their joint order, what else is as long as they are,
which attention is over them, where the tokens are seen last. What they do not show becomes a TODO.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from support.recording import AttentionCall, ModuleCall, Recording, copied, numbers, record
from torch import Tensor, nn

from cp_runtime.comfy.forward.ui_interception import innermost_method
from cp_runtime.engine.plan import ModulePlan
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput
from cp_runtime.families.family import FamilyPlan, gathered, side, tokens
from cp_runtime.nested import map_tensors, tensors

NAMES = {5: "video", 4: "img", 3: "audio"}
"""Name of the stream that is denoised, by the dimensions of the model's input."""

CONTROL = re.compile(r"control\w*(?:\.get\(|\[)[\"'](input|middle|output)[\"']")


Fit = tuple[tuple[str, ...], int, int]
"""Streams, the dimension that is as long as they are, number of dimensions."""


@dataclass
class Draft:
    """A table and what a person must decide.

    Args:
        remarks: by the module pattern they are about; "" = about the model. "TODO" stands in front of what a person must decide.
    """

    plan: FamilyPlan
    remarks: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call of a model's innermost forward: arguments by name, entries of transformer_options."""

    model: nn.Module
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    def record(self) -> Recording:
        forward = getattr(self.model, innermost_method(self.model))
        return record(self.model, forward, copied({**self.arguments, "transformer_options": dict(self.options)}))


def draft(calls: Sequence[Call]) -> Draft:
    """Draft a table from calls of models of one class. The first is a plain one."""
    return _Drafting(calls).run()


class _Drafting:
    def __init__(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        self._model, self._recordings = first.model, [call.record() for call in calls]
        latent = next(name for name, value in first.arguments.items() if any(True for _ in tensors(value)))
        # The same call with another latent: what differs depends on it.
        changed = map_tensors(first.arguments[latent], lambda t: t + torch.randn_like(t))
        self._other = replace(first, arguments={**first.arguments, latent: changed}).record()
        shape = next(tensors(first.arguments[latent])).shape
        self._denoised = "img" if len(shape) == 5 and shape[2] == 1 else NAMES.get(len(shape), "tokens")
        latents = [next(tensors(call.arguments[latent])) for call in calls]
        self._frames = [x.shape[2] if x.ndim == 5 else 0 for x in latents]
        self._lengths: list[dict[str, int]] = [{} for _ in calls]
        self._joint: tuple[str, ...] = ()
        self._names: list[str] = []
        self._remarks: dict[str, list[str]] = {}
        self._lists = self._block_lists()

    def run(self) -> Draft:
        modules: dict[str, ModulePlan] = {}
        for name in self._lists:
            blocks = self._blocks(name)
            if blocks is not None:
                modules[f"{name}.*"] = blocks
        source = inspect.getsource(type(self._model))
        kinds = list(dict.fromkeys(CONTROL.findall(source)))
        if kinds:
            self._say("", f"TODO control: see to which tokens the residuals are added; {self._denoised!r} is a guess")
        cls = type(self._model)
        plan = FamilyPlan(
            family=cls.__name__,
            model_class=f"{cls.__module__}.{cls.__qualname__}",
            modules=modules,
            outputs={**self._joins(modules), **self._outputs(modules)},
            control=dict.fromkeys(kinds, self._denoised),
            attention_names=tuple(dict.fromkeys(self._names)),
        )
        return Draft(plan, self._remarks)

    def _say(self, pattern: str, remark: str) -> None:
        said = self._remarks.setdefault(pattern, [])
        if not any(before.split()[:2] == remark.split()[:2] for before in said):  # one about each argument
            said.append(remark)

    def _block_lists(self) -> list[str]:
        """Paths of the outermost ModuleLists whose items attend, in the order in which they are called."""
        attending = [call.path for call in self._recordings[0].attention]
        lists = [path for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)]
        outermost = [path for path in lists if not any(path.startswith(f"{around}.") for around in lists)]
        called: dict[str, None] = {}
        for call in self._recordings[0].modules:
            around, _, item = call.path.rpartition(".")
            if item.isdigit() and around in outermost and any(_inside(path, call.path) for path in attending):
                called[around] = None
        return list(called)

    def _blocks(self, name: str) -> ModulePlan | None:
        pattern, first = f"{name}.*", self._items(0, name)[0]
        streams = self._streams(name, first)
        if not any(self._changed(first, argument).any() for argument in streams):
            self._say("", f"{pattern} has no tokens of the latent, and every rank computes it whole")
            return None
        firsts = [next(iter(self._items(i, name)), None) for i in range(len(self._recordings))]
        lengths = {a: [_length(call, a) if call else 0 for call in firsts] for a in streams}
        joint = [
            sum(known.get(stream, 0) for stream in self._joint) if call else 0
            for known, call in zip(self._lengths, firsts, strict=True)
        ]
        if len(streams) == 1 and len(self._joint) > 1 and joint in lengths.values():
            inputs, over = {}, self._joint  # what earlier blocks returned, one behind the other: split already
        else:
            for argument, stream in streams.items():
                for known, length in zip(self._lengths, lengths[argument], strict=True):
                    known[stream] = length
            over = self._order(name, tuple(streams.values()))
            self._joint = max(self._joint, over, key=len)
            inputs = {a: tokens(stream) for stream in over for a, own in streams.items() if own == stream}
        attention, local = self._attention(name, over)
        return ModulePlan(inputs={**inputs, **self._sides(name, over, streams)}, attention=attention, local=local)

    def _items(self, index: int, name: str) -> list[ModuleCall]:
        return [
            c for c in self._recordings[index].modules if c.path.rpartition(".")[0] == name and c.path[len(name) + 1 :].isdigit()
        ]

    def _streams(self, name: str, first: ModuleCall) -> dict[str, str]:
        """Arguments that are tokens: the block returns the like. Argument -> stream."""
        after = next((call for call in self._items(0, name) if call.path != first.path), None)
        found: dict[str, str] = {}
        for output in [o for o in tensors(first.output) if o.ndim == 3]:
            alike = [a for a, v in first.arguments.items() if isinstance(v, Tensor) and v.shape == output.shape and a not in found]
            handed_on = [a for a in alike if after is not None and _equal(after.arguments.get(a), output)]
            for argument in (handed_on or alike)[:1]:
                found[argument] = self._stream(first, argument, set(found.values()))
        return found

    def _stream(self, call: ModuleCall, argument: str, taken: set[str]) -> str:
        changed = self._changed(call, argument)
        stream = "txt" if not changed.any() else self._denoised if changed.all() else "all"
        while stream in taken:
            stream += "_2"
        return stream

    def _changed(self, call: ModuleCall, argument: str) -> Tensor:
        """Which tokens of an argument depend on the latent."""
        value, other = (
            next(c for c in r.modules if c.path == call.path).arguments[argument] for r in (self._recordings[0], self._other)
        )
        if value.shape != other.shape:  # the model keeps something from call to call
            return torch.ones(value.shape[1], dtype=torch.bool)
        changed: Tensor = (other != value).any(-1).any(0)
        return changed

    def _order(self, name: str, streams: tuple[str, ...]) -> tuple[str, ...]:
        """Joint order of the streams: that of the queries that depend on the latent and those that do not."""
        if len(streams) < 2:
            return streams
        item = self._items(0, name)[0].path
        calls = [[a for a in r.attention if _inside(a.path, item)] for r in (self._recordings[0], self._other)]
        total = sum(self._lengths[0][stream] for stream in streams)
        pair = next(((a, b) for a, b in zip(*calls, strict=True) if a.q.shape[1] == total), None)
        if pair is None:
            self._say(
                f"{name}.*", "TODO attention: none is over all of its streams: say in ModulePlan(attention=...) which are over what"
            )
            return streams
        changed = (pair[0].q != pair[1].q).flatten(2).any(-1).any(0).tolist()
        for order in permutations(streams):
            expected = [stream != "txt" for stream in order for _ in range(self._lengths[0][stream])]
            if expected == changed:
                return order
        self._say(f"{name}.*", "TODO joint order: it is not to be seen: read where they are concatenated")
        return streams

    def _sides(self, name: str, over: tuple[str, ...], streams: Mapping[str, str]) -> dict[str, ContextParallelInput]:
        """Other arguments that are as long as a stream, in every recording that has them."""
        fits: dict[str, set[Fit]] = {}
        handed_on: set[str] = set()  # what an earlier block returned: split already
        for index in range(len(self._recordings)):
            returned = [t for around in self._lists for call in self._items(index, around) for t in tensors(call.output)]
            for call in self._items(index, name):
                # ControlNet residuals are split where the forward adds them.
                others = {a: v for a, v in call.arguments.items() if a not in streams and not a.endswith("control")}
                for argument, value in others.items():
                    self._remark(name, argument, value, index)
                    for tensor in tensors(value):
                        if any(_equal(tensor, out) for out in returned):
                            handed_on.add(argument)
                        now = self._fits(index, tensor, over)
                        # A length of 1 is for all tokens.
                        now |= {fit for fit in fits.get(argument, ()) if fit[2] == tensor.ndim and tensor.shape[fit[1]] == 1}
                        fits[argument] = fits.get(argument, now) & now
        return {
            argument: self._side(name, argument, several)
            for argument, several in fits.items()
            if several and argument not in handed_on and not self._is_mask(name, argument, several)
        }

    def _fits(self, index: int, tensor: Tensor, over: tuple[str, ...]) -> set[Fit]:
        known = self._lengths[index]
        totals = {names: sum(known.get(s, 0) for s in names) for names in [*((stream,) for stream in over), over, self._joint]}
        sizes = list(enumerate(tensor.shape))
        return {(names, dim, tensor.ndim) for names, total in totals.items() for dim, size in sizes if size == total}

    def _remark(self, name: str, argument: str, value: Any, index: int) -> None:
        """What is not as long as a stream and may still speak about tokens."""
        if any(True for _ in numbers(value)):
            question = "does it count tokens? See TokenRanges"
            self._say(f"{name}.*", f"TODO {argument} = {value!r}: {question}")
        for tensor in tensors(value):
            if tensor.ndim > 3 and tensor.shape[1] == self._frames[index] > 1:
                question = "a value per frame? See Repeated in wan.py"
                self._say(f"{name}.*", f"TODO {argument} is {tuple(tensor.shape)} in a case: {question}")

    def _is_mask(self, name: str, argument: str, several: set[Fit]) -> bool:
        both = len({dim for _, dim, _ in several}) > 1
        if both:
            self._say(f"{name}.*", f"{argument} is left out: a mask of rows and keys goes to attention whole")
        return both

    def _side(self, name: str, argument: str, several: set[Fit]) -> ContextParallelInput:
        if len(several) > 1:
            others = " or ".join(sorted(" + ".join(names) for names, _, _ in several))
            self._say(f"{name}.*", f"TODO {argument} is as long as {others}: add a case in which they differ")
        names, dim, ndim = min(several, key=lambda fit: len(fit[0]))
        return side(names, dim=dim, dims=ndim)

    def _attention(self, name: str, over: tuple[str, ...]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Streams of the attention in a block, and submodules whose keys are no stream."""
        fits: dict[str, set[tuple[str, ...]]] = {}
        for index, recording in enumerate(self._recordings):
            for call in recording.attention:
                item = re.match(rf"{re.escape(name)}\.\d+(?=\.|$)", call.path)
                if item is None:
                    continue
                inner = call.path[item.end() + 1 :]
                now = {s for s in [*((n,) for n in over), over] if self._is_over(index, call, s)}
                fits[inner] = fits.get(inner, now) & now
                if now and not call.reached:
                    self._names.append(call.name)
        shared = {inner: max(streams, key=len) for inner, streams in fits.items() if streams}
        local = tuple(dict.fromkeys(_outermost(inner, shared) for inner, streams in fits.items() if not streams))
        for inner in local:
            if not inner:
                self._say(
                    f"{name}.*", "TODO local: the block itself attends to something else than its tokens: plan a submodule instead"
                )
        if len(set(shared.values())) > 1:
            self._say(f"{name}.*", f"TODO attention differs: {shared}; plan the submodules, or set FamilyPlan(attention=...)")
        if not shared:
            self._say(
                f"{name}.*", "TODO no attention over its tokens was found: matrix products and other libraries are out of reach"
            )
        return (max(shared.values(), key=len) if shared else None), tuple(inner for inner in local if inner)

    def _is_over(self, index: int, call: AttentionCall, streams: tuple[str, ...]) -> bool:
        total = sum(self._lengths[index][name] for name in streams)
        return call.q.shape[1] == call.k.shape[1] == total

    def _joins(self, modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
        """Streams that end where later blocks define one of their own: they are gathered before these."""
        found: dict[str, Any] = {}
        last = next((i for i, (_, plan) in reversed(list(enumerate(modules.items()))) if plan.inputs and _defines(plan)), 0)
        for pattern, plan in list(modules.items())[:last]:
            defined = _defines(plan)
            found[pattern.replace("*", "-1")] = gathered(defined[0]) if len(defined) == 1 else [gathered(name) for name in defined]
        return found

    def _outputs(self, modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
        """The last module behind the blocks that returns as many tokens as it gets."""
        lists = [pattern.removesuffix(".*") for pattern in modules]
        calls, lengths = self._recordings[0].modules, self._lengths[0]
        if not lists:
            return {}
        last = max(i for i, call in enumerate(calls) if call.path.rpartition(".")[0] in lists)
        candidates = dict.fromkeys([(self._denoised,), ("all",), self._joint])
        for streams in (s for s in candidates if s and lengths.keys() >= set(s)):
            total = sum(lengths[name] for name in streams)
            seen = [c.path for c in calls[last + 1 :] if _has(c.arguments, total) and _has(c.output, total)]
            if seen:
                depth = min(path.count(".") for path in seen)
                path = [path for path in seen if path.count(".") == depth][-1]
                return {path: gathered(streams[0] if len(streams) == 1 else streams)}
        self._say("", "outputs: nothing behind the blocks sees the tokens one by one; they are gathered behind the last block")
        block, streams = f"{lists[-1]}.-1", modules[f"{lists[-1]}.*"].attention or self._joint
        each = [t.shape[1] for t in tensors(calls[last].output)]
        here = [o for o in each if o == lengths.get(self._denoised)]
        if not here and len(streams) > 1 and self._denoised in streams:
            return {block: gathered(self._denoised, within=streams)}
        picked: list[ContextParallelOutput | None] = [gathered(self._denoised) if o in here else None for o in each]
        return {block: picked[0] if len(picked) == 1 and picked[0] else picked if here else gathered(streams[0])}


def _defines(plan: ModulePlan) -> list[str]:
    """Streams that a block's own arguments define."""
    inputs = [t for t in plan.inputs.values() if isinstance(t, ContextParallelInput) and not t.side]
    return [stream for t in inputs for stream in t.streams or ()]


def _inside(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _outermost(inner: str, shared: Mapping[str, Any]) -> str:
    """The shortest beginning of a path that holds none of some others."""
    parts = inner.split(".")
    beginnings = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return next((b for b in beginnings if not any(_inside(path, b) for path in shared)), "")


def _length(call: ModuleCall, argument: str) -> int:
    return int(call.arguments[argument].shape[1])


def _has(value: Any, length: int) -> bool:
    return any(t.ndim == 3 and t.shape[1] == length for t in tensors(dict(value) if isinstance(value, Mapping) else value))


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a, b)
