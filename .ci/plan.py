"""Drafts the table of a model family, from the calls that a file of tests/support/families makes of a tiny model.

    make plan MODEL=comfy.ldm.hydit.models.HunYuanDiT [CASE=tests/support/families/new.py]

Without CASE, the file with a model of that class is taken. Prints a file for cp_runtime/families, and what the tracer says to it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
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

load_package()
from plan_draft import Call, Draft, draft
from support.tracer import trace

from cp_runtime.engine.plan import ModulePlan
from cp_runtime.engine.transforms import ContextParallelOutput


def streams_text(streams: tuple[str, ...], joint: tuple[str, ...]) -> str:
    return "JOINT" if streams == joint and len(joint) > 1 else repr(streams[0] if len(streams) == 1 else streams)


def input_text(value: Any, joint: tuple[str, ...]) -> str:
    streams = streams_text(value.streams or (), joint)
    return f"side({streams}, dim={value.split_dim}, dims={value.expected_dims})" if value.side else f"tokens({streams})"


def output_text(value: Any, joint: tuple[str, ...]) -> str:
    if isinstance(value, ContextParallelOutput):
        stream = streams_text((value.stream,) if isinstance(value.stream, str) else value.stream or (), joint)
        return f"gathered({stream}{f', within={streams_text(value.within, joint)}' if value.within else ''})"
    return f"[{', '.join('None' if item is None else output_text(item, joint) for item in value)}]"


def module_text(plan: ModulePlan, joint: tuple[str, ...]) -> str:
    parts = []
    if plan.inputs:
        parts.append(f"inputs={{{', '.join(f'{name!r}: {input_text(value, joint)}' for name, value in plan.inputs.items())}}}")
    if plan.attention is not None:
        parts.append(f"attention={'JOINT' if plan.attention == joint and len(joint) > 1 else repr(plan.attention)}")
    if plan.local:
        parts.append(f"local={plan.local!r}")
    return f"ModulePlan({', '.join(parts)})"


def render(drafted: Draft) -> str:
    """A file for cp_runtime/families."""
    plan = drafted.plan
    joint = max((module.attention or () for module in plan.modules.values()), key=len, default=())
    remarks = {pattern: [f"# {remark}" for remark in found] for pattern, found in drafted.remarks.items()}
    body = [
        f"{plan.family.upper()} = FamilyPlan(",
        f"family={plan.family!r},  # TODO the name that users know",
        f"model_class={plan.model_class!r},",
        *remarks.get("", []),
        "modules={",
    ]
    for pattern, module in plan.modules.items():
        body += [*remarks.get(pattern, []), f"{pattern!r}: {module_text(module, joint)},"]
    outputs = ", ".join(f"{path!r}: {output_text(output, joint)}" for path, output in plan.outputs.items())
    body += ["},", f"outputs={{{outputs}}},"]
    for name in ("control", "attention_names"):
        if value := getattr(plan, name):
            body.append(f"{name}={value!r},")
    words = [word for word in ("gathered", "side", "tokens") if any(f"{word}(" in line for line in body)]
    head = [f'"""TODO: what {plan.family} is."""', "from ..engine.plan import ModulePlan"]
    head += [f"from .family import FamilyPlan, {', '.join(words)}", f"JOINT = {joint!r}" if len(joint) > 1 else ""]
    source = "\n".join([*head, *body, ")", ""])
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
        drafted = draft([Call(models[case.model], case.make(), case.options) for _, case in found])
        sys.stdout.write(render(drafted))
        wrong = {case.name: trace(models[case.model], drafted.plan, case.make(), case.options) for _, case in found}
    failed = {name: findings for name, findings in wrong.items() if findings}
    sys.stdout.write(f"\n# The tracer finds it right in {len(wrong) - len(failed)} of {len(wrong)} cases.\n")
    for name, findings in failed.items():
        sys.stdout.write(f"# {name}:\n" + "".join(f"#   {finding}\n" for finding in findings))


if __name__ == "__main__":
    main()
