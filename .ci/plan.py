"""Drafts the table of a model family, from the calls that a file of tests/support/families makes of a tiny model.

    make plan MODEL=comfy.ldm.hydit.models.HunYuanDiT [CASE=tests/support/families/new.py]

Without CASE, the file with a model of that class is taken. Prints a file for cp_runtime/families, and what the tracer says to it.
What lengths and values show goes into the table: block lists, streams and their joint order, what else is as long as they are,
which attention is over them, where the tokens are seen last. What they do not show becomes a TODO.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [os.environ["COMFYUI_PATH"], str(ROOT / "tests")]

import comfy.cli_args

comfy.cli_args.args.cpu = True
import torch
from support import families
from support.models import build
from support.package import load_package, load_script
from torch import Tensor, nn

load_package()
from support.recording import AttentionCall, ModuleCall, Recording, copied, numbers, record, shapes_in
from support.tracer import trace

from cp_runtime.comfy.ui.interception import innermost_method
from cp_runtime.engine.plan import ModulePlan
from cp_runtime.engine.transforms import ContextParallelInput, ContextParallelOutput
from cp_runtime.families.family import FamilyPlan, gathered, side, tokens
from cp_runtime.nested import map_tensors, tensors

NAMES = {5: "video", 4: "img", 3: "audio"}
"""Name of the stream that is denoised, by the dimensions of the model's input."""

CONTROL = re.compile(r"control\w*(?:\.get\(|\[)[\"'](input|middle|output)[\"']")

Streams = tuple[str, ...]
Fit = tuple[Streams, int, int]
"""Streams, the dimension that is as long as they are, number of dimensions."""


# --- the draft --------------------------------------------------------------------------------------------------------


def recorded(model: nn.Module, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Recording:
    """Record a call of a model's innermost forward: arguments by name, entries of transformer_options."""
    forward = getattr(model, innermost_method(model))
    return record(model, forward, copied({**arguments, "transformer_options": dict(options)}))


@dataclass(frozen=True)
class Case:
    """A recorded call.

    Args:
        frames: of the latent.
        lengths: of the streams that are known by now.
    """

    recording: Recording
    frames: int
    lengths: dict[str, int] = field(default_factory=dict)

    def items(self, name: str) -> list[ModuleCall]:
        """Calls of the modules in a list."""
        inside = [(call, *call.path.rpartition(".")) for call in self.recording.modules]
        return [call for call, around, _, item in inside if around == name and item.isdigit()]

    def total(self, streams: Streams) -> int:
        """Length of streams behind each other."""
        return sum(self.lengths.get(stream, 0) for stream in streams)


class Drafting:
    """Drafts a table from calls of models of one class.

    Args:
        calls: a model each, arguments of its innermost forward by name, entries of transformer_options. The first is a plain one.

    Attributes:
        remarks: by the block list they are about; "" = about the model. "TODO" stands in front of what a person must decide.
    """

    def __init__(self, calls: Sequence[tuple[nn.Module, Mapping[str, Any], Mapping[str, Any]]]) -> None:
        self._model, arguments, options = calls[0]
        latent = next(name for name, value in arguments.items() if any(True for _ in tensors(value)))
        latents = [next(tensors(given[latent])) for _, given, _ in calls]
        frames = [x.shape[2] if x.ndim == 5 else 0 for x in latents]
        self._cases = [Case(recorded(*call), count) for call, count in zip(calls, frames, strict=True)]
        # The same call with another latent: what differs depends on it.
        changed = map_tensors(arguments[latent], lambda t: t + torch.randn_like(t))
        self._pair = (self._cases[0].recording, recorded(self._model, {**arguments, latent: changed}, options))
        self._denoised = "img" if frames[0] == 1 else NAMES.get(latents[0].ndim, "tokens")
        self._joint: Streams = ()
        self._names: list[str] = []
        self.remarks: dict[str, list[str]] = {}
        self._lists = self._block_lists()

    def plan(self) -> FamilyPlan:
        """Draft the table, and note remarks."""
        blocks = {f"{name}.*": self._blocks(name) for name in self._lists}
        modules = {pattern: plan for pattern, plan in blocks.items() if plan is not None}
        cls = type(self._model)
        kinds = list(dict.fromkeys(CONTROL.findall(inspect.getsource(cls))))
        if kinds:
            self._say("", f"TODO control: see to which tokens the residuals are added; {self._denoised!r} is a guess")
        return FamilyPlan(
            family=cls.__name__,
            model_class=f"{cls.__module__}.{cls.__qualname__}",
            modules=modules,
            outputs={**_joins(modules), **self._outputs(modules)},
            control=dict.fromkeys(kinds, self._denoised),
            attention_names=tuple(dict.fromkeys(self._names)),
        )

    def _say(self, name: str, remark: str) -> None:
        said = self.remarks.setdefault(name, [])
        if not any(before.split()[:2] == remark.split()[:2] for before in said):  # one about each argument
            said.append(remark)

    def _block_lists(self) -> list[str]:
        """Paths of the outermost ModuleLists whose items attend, in the order in which they are called."""
        plain = self._cases[0].recording
        lists = [path for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)]
        outermost = [path for path in lists if not any(path.startswith(f"{around}.") for around in lists)]
        called: dict[str, None] = {}
        for call in plain.modules:
            around, _, item = call.path.rpartition(".")
            if item.isdigit() and around in outermost and any(_inside(each.path, call.path) for each in plain.attention):
                called[around] = None
        return list(called)

    def _blocks(self, name: str) -> ModulePlan | None:
        first = self._cases[0].items(name)[0]
        streams = self._streams(name, first)
        if not any(self._changed(first, argument).any() for argument in streams):
            self._say("", f"{name}.* has no tokens of the latent, and every rank computes it whole")
            return None
        firsts = [next(iter(case.items(name)), None) for case in self._cases]
        lengths = {a: [int(call.arguments[a].shape[1]) if call else 0 for call in firsts] for a in streams}
        joint = [case.total(self._joint) if call else 0 for case, call in zip(self._cases, firsts, strict=True)]
        if len(streams) == 1 and len(self._joint) > 1 and joint in lengths.values():
            inputs, over = {}, self._joint  # what earlier blocks returned, one behind the other: split already
        else:
            for argument, stream in streams.items():
                for case, length in zip(self._cases, lengths[argument], strict=True):
                    case.lengths[stream] = length
            over = self._order(name, tuple(streams.values()))
            self._joint = max(self._joint, over, key=len)
            inputs = {a: tokens(stream) for stream in over for a, own in streams.items() if own == stream}
        attention, local = self._attention(name, over)
        return ModulePlan(inputs={**inputs, **self._sides(name, over, streams)}, attention=attention, local=local)

    def _streams(self, name: str, first: ModuleCall) -> dict[str, str]:
        """Arguments that are tokens: the block returns the like. Argument -> stream."""
        after = next((call for call in self._cases[0].items(name) if call.path != first.path), None)
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
        value, other = (next(c for c in r.modules if c.path == call.path).arguments[argument] for r in self._pair)
        if value.shape != other.shape:  # the model keeps something from call to call
            return torch.ones(value.shape[1], dtype=torch.bool)
        changed: Tensor = (other != value).any(-1).any(0)
        return changed

    def _order(self, name: str, streams: Streams) -> Streams:
        """Joint order of the streams: that of the queries that depend on the latent and those that do not."""
        if len(streams) < 2:
            return streams
        plain = self._cases[0]
        item, total = plain.items(name)[0].path, plain.total(streams)
        calls = [[a for a in recording.attention if _inside(a.path, item)] for recording in self._pair]
        pair = next(((a, b) for a, b in zip(*calls, strict=True) if a.q.shape[1] == total), None)
        if pair is None:
            self._say(name, "TODO attention: none is over all of its streams: say in ModulePlan(attention=...) which are over what")
            return streams
        changed = (pair[0].q != pair[1].q).flatten(2).any(-1).any(0).tolist()
        for order in permutations(streams):
            if [stream != "txt" for stream in order for _ in range(plain.lengths[stream])] == changed:
                return order
        self._say(name, "TODO joint order: it is not to be seen: read where they are concatenated")
        return streams

    def _sides(self, name: str, over: Streams, streams: Mapping[str, str]) -> dict[str, ContextParallelInput]:
        """Other arguments that are as long as a stream, in every recording that has them."""
        fits: dict[str, set[Fit]] = {}
        handed_on: set[str] = set()  # what an earlier block returned: split already
        for case in self._cases:
            returned = [t for around in self._lists for call in case.items(around) for t in tensors(call.output)]
            for call in case.items(name):
                # ControlNet residuals are split where the forward adds them.
                others = {a: v for a, v in call.arguments.items() if a not in streams and not a.endswith("control")}
                for argument, value in others.items():
                    self._remark(name, argument, value, case.frames)
                    for tensor in tensors(value):
                        if any(_equal(tensor, out) for out in returned):
                            handed_on.add(argument)
                        totals = {names: case.total(names) for names in [*((stream,) for stream in over), over, self._joint]}
                        now = {
                            (names, dim, tensor.ndim)
                            for names, total in totals.items()
                            for dim, size in enumerate(tensor.shape)
                            if size == total
                        }
                        # A length of 1 is for all tokens.
                        now |= {fit for fit in fits.get(argument, ()) if fit[2] == tensor.ndim and tensor.shape[fit[1]] == 1}
                        fits[argument] = fits.get(argument, now) & now
        found = {}
        for argument, several in fits.items():
            if not several or argument in handed_on:
                continue
            if len({dim for _, dim, _ in several}) > 1:
                self._say(name, f"{argument} is left out: a mask of rows and keys goes to attention whole")
                continue
            if len(several) > 1:
                others_text = " or ".join(sorted(" + ".join(names) for names, _, _ in several))
                self._say(name, f"TODO {argument} is as long as {others_text}: add a case in which they differ")
            names, dim, ndim = min(several, key=lambda fit: len(fit[0]))
            found[argument] = side(names, dim=dim, dims=ndim)
        return found

    def _remark(self, name: str, argument: str, value: Any, frames: int) -> None:
        """What is not as long as a stream and may still speak about tokens."""
        if any(True for _ in numbers(value)):
            self._say(name, f"TODO {argument} = {shapes_in(value)!r}: does it count tokens? See TokenRanges")
        for tensor in tensors(value):
            if tensor.ndim > 3 and tensor.shape[1] == frames > 1:
                self._say(name, f"TODO {argument} is {tuple(tensor.shape)} in a case: a value per frame? See Repeated in wan.py")

    def _attention(self, name: str, over: Streams) -> tuple[Streams | None, tuple[str, ...]]:
        """Streams of the attention in a block, and submodules whose keys are no stream."""
        fits: dict[str, set[Streams]] = {}
        for case in self._cases:
            for call in case.recording.attention:
                item = re.match(rf"{re.escape(name)}\.\d+(?=\.|$)", call.path)
                if item is None:
                    continue
                inner = call.path[item.end() + 1 :]
                now = {s for s in [*((n,) for n in over), over] if _is_over(call, case.total(s))}
                fits[inner] = fits.get(inner, now) & now
                if now and not call.reached:
                    self._names.append(call.name)
        shared = {inner: max(streams, key=len) for inner, streams in fits.items() if streams}
        local = tuple(dict.fromkeys(_outermost(inner, shared) for inner, streams in fits.items() if not streams))
        if "" in local:
            self._say(name, "TODO local: the block itself attends to something else than its tokens: plan a submodule instead")
        if len(set(shared.values())) > 1:
            self._say(name, f"TODO attention differs: {shared}; plan the submodules, or set FamilyPlan(attention=...)")
        if not shared:
            self._say(name, "TODO no attention over its tokens was found: matrix products and other libraries are out of reach")
        return (max(shared.values(), key=len) if shared else None), tuple(filter(None, local))

    def _outputs(self, modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
        """The last module behind the blocks that returns as many tokens as it gets."""
        lists = [pattern.removesuffix(".*") for pattern in modules]
        plain = self._cases[0]
        calls = plain.recording.modules
        if not lists:
            return {}
        last = max(i for i, call in enumerate(calls) if call.path.rpartition(".")[0] in lists)
        candidates = dict.fromkeys([(self._denoised,), ("all",), self._joint])
        for streams in (s for s in candidates if s and plain.lengths.keys() >= set(s)):
            total = plain.total(streams)
            seen = [c.path for c in calls[last + 1 :] if _has(dict(c.arguments), total) and _has(c.output, total)]
            if seen:
                depth = min(path.count(".") for path in seen)
                path = [path for path in seen if path.count(".") == depth][-1]
                return {path: gathered(streams[0] if len(streams) == 1 else streams)}
        self._say("", "outputs: nothing behind the blocks sees the tokens one by one; they are gathered behind the last block")
        block, streams = f"{lists[-1]}.-1", modules[f"{lists[-1]}.*"].attention or self._joint
        each = [t.shape[1] for t in tensors(calls[last].output)]
        here = [o for o in each if o == plain.lengths.get(self._denoised)]
        if not here and len(streams) > 1 and self._denoised in streams:
            return {block: gathered(self._denoised, within=streams)}
        picked: list[ContextParallelOutput | None] = [gathered(self._denoised) if o in here else None for o in each]
        return {block: picked[0] if len(picked) == 1 and picked[0] else picked if here else gathered(streams[0])}


def _joins(modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
    """Streams that end where later blocks define one of their own: they are gathered before these."""
    defined = {pattern: _defines(plan) for pattern, plan in modules.items()}
    last = max((i for i, streams in enumerate(defined.values()) if streams), default=0)
    outputs = {pattern.replace("*", "-1"): [gathered(name) for name in streams] for pattern, streams in [*defined.items()][:last]}
    return {block: each[0] if len(each) == 1 else each for block, each in outputs.items()}


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


def _is_over(call: AttentionCall, length: int) -> bool:
    return call.q.shape[1] == call.k.shape[1] == length


def _has(value: Any, length: int) -> bool:
    return any(t.ndim == 3 and t.shape[1] == length for t in tensors(value))


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a, b)


# --- its text ---------------------------------------------------------------------------------------------------------


def names_text(streams: str | Streams | None) -> str:
    """Streams as the shorthands take them: one by its name alone."""
    names = (streams,) if isinstance(streams, str) else streams or ()
    return repr(names[0] if len(names) == 1 else names)


def text(value: Any) -> str:
    """A transform, or several in a list."""
    if isinstance(value, ContextParallelInput):
        streams = names_text(value.streams)
        return f"side({streams}, dim={value.split_dim}, dims={value.expected_dims})" if value.side else f"tokens({streams})"
    if isinstance(value, ContextParallelOutput):
        return f"gathered({names_text(value.stream)}{f', within={names_text(value.within)}' if value.within else ''})"
    return "None" if value is None else f"[{', '.join(map(text, value))}]"


def module_text(plan: ModulePlan) -> str:
    parts = []
    if plan.inputs:
        parts.append(f"inputs={{{', '.join(f'{name!r}: {text(value)}' for name, value in plan.inputs.items())}}}")
    parts += [f"attention={plan.attention!r}"] if plan.attention is not None else []
    parts += [f"local={plan.local!r}"] if plan.local else []
    return f"ModulePlan({', '.join(parts)})"


def render(plan: FamilyPlan, remarks: Mapping[str, Sequence[str]]) -> str:
    """A file for cp_runtime/families."""
    lines = [
        f"{plan.family.upper()} = FamilyPlan(",
        f"family={plan.family!r},  # TODO the name that users know",
        f"model_class={plan.model_class!r},",
        *(f"# {remark}" for remark in remarks.get("", ())),
        "modules={",
    ]
    for pattern, module in plan.modules.items():
        lines += [f"# {remark}" for remark in remarks.get(pattern.removesuffix(".*"), ())]
        lines.append(f"{pattern!r}: {module_text(module)},")
    lines += ["},", f"outputs={{{', '.join(f'{path!r}: {text(output)}' for path, output in plan.outputs.items())}}},"]
    lines += [f"{name}={value!r}," for name in ("control", "attention_names") if (value := getattr(plan, name))]
    words = [word for word in ("gathered", "side", "tokens") if any(f"{word}(" in line for line in lines)]
    head = [f'"""TODO: what {plan.family} is."""', "from ..engine.plan import ModulePlan"]
    head.append(f"from .family import {', '.join(['FamilyPlan', *words])}")
    joint = max((module.attention or () for module in plan.modules.values()), key=len, default=())
    if len(joint) > 1:
        lines = [line if line.startswith("#") else line.replace(repr(joint), "JOINT") for line in lines]
        head.append(f"JOINT = {joint!r}")
    source = "\n".join([*head, *lines, ")", ""])
    formatter = [sys.executable, "-m", "ruff", "format", "--config", str(ROOT / "pyproject.toml"), "-"]
    return subprocess.run(formatter, input=source, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="full name of the model's class")
    parser.add_argument("--case", type=Path, help="file with MODELS and CASES, where it is not in tests/support/families")
    options = parser.parse_args()
    files = [load_script(options.case, "support.families")] if options.case else [families.load(name) for name in families.NAMES]
    found = [(file, case) for file in files for case in file.CASES if file.MODELS[case.model].cls == options.model]
    if not found:
        sys.exit(
            f"no case for {options.model}. Write a tiny model and a call of it, as in tests/support/families/hydit.py, and name "
            "the file: make plan MODEL=... CASE=path.py"
        )
    with torch.inference_mode():
        models = {case.model: build(file.MODELS[case.model]) for file, case in found}
        drafting = Drafting([(models[case.model], case.make(), case.options) for _, case in found])
        plan = drafting.plan()
        sys.stdout.write(render(plan, drafting.remarks))
        wrong = {case.name: trace(models[case.model], plan, case.make(), case.options) for _, case in found}
    failed = {name: findings for name, findings in wrong.items() if findings}
    sys.stdout.write(f"\n# The tracer finds it right in {len(wrong) - len(failed)} of {len(wrong)} cases.\n")
    for name, findings in failed.items():
        sys.stdout.write(f"# {name}:\n" + "".join(f"#   {finding}\n" for finding in findings))


if __name__ == "__main__":
    main()
