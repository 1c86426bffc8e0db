"""Traces cases of the families named, and tables with a mistake in them; prints a JSON object: what -> findings."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [os.environ["COMFYUI_PATH"], str(Path(__file__).resolve().parents[1])]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
import torch  # noqa: E402
from support import families  # noqa: E402
from support.models import build  # noqa: E402
from support.package import load_package  # noqa: E402

load_package()
from support.tracer import trace  # noqa: E402

from cp_runtime.engine.plan import method_of  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402
from cp_runtime.families.family import gathered, side, tokens  # noqa: E402

SWAPPED = side(("txt", "img"), dim=1, dims=6)


def module(pattern, **changes):
    """A change of what the table says about some modules; an input that becomes None is left out."""

    def change(plan):
        before = plan.modules[pattern]
        inputs = {**before.inputs, **changes.get("inputs", {})}
        kept = {name: transform for name, transform in inputs.items() if transform is not None}
        return replace(plan, modules={**plan.modules, pattern: replace(before, **{**changes, "inputs": kept})})

    return change


def swapped_rope(plan):
    for pattern in ("double_stream_blocks.*", "single_stream_blocks.*"):
        plan = module(pattern, inputs={"rope": SWAPPED})(plan)
    return plan


# What -> family, case, change of its table.
MISTAKES = {
    "positions are not split": ("hydit", "hydit", module("blocks.*", inputs={"freq_cis_img": None})),
    "positions are split along another dimension": ("flux", "flux",
        module("double_blocks.*", inputs={"pe": side(("txt", "img"), dim=1, dims=6)})),
    "number of dimensions": ("hydit", "hydit", module("blocks.*", inputs={"freq_cis_img": side("img", dim=0, dims=3)})),
    "streams stand for each other": ("flux", "flux",
        module("double_blocks.*", inputs={"txt": tokens("img"), "img": tokens("txt")})),
    "joint order": ("hidream", "hidream", swapped_rope),
    "attention_names is missing": ("hydit", "hydit", lambda plan: replace(plan, attention_names=())),
    "local is missing": ("hydit", "hydit", module("blocks.*", local=())),
    "attention is not shared": ("wan", "wan t2v", module("blocks.*", attention=())),
    "residuals are not split": ("hydit", "hydit control", lambda plan: replace(plan, control={"output": None})),
    "tokens are gathered too early": ("hydit", "hydit", lambda plan: replace(plan, outputs={"blocks.0": gathered("img")})),
    "a mask is not split": ("qwen_image", "qwen text mask",
        module("transformer_blocks.*", inputs={"encoder_hidden_states_mask": None})),
    "an index of tokens is not planned": ("qwen_image", "qwen edit timestep zero",
        module("transformer_blocks.*", inputs={"timestep_zero_index": None})),
}  # fmt: skip


@functools.cache
def model_of(family, name):
    """A model. The tracer takes its plan off again."""
    return build(families.load(family).MODELS[name])


def traced(family, case, change=lambda plan: plan):
    model = model_of(family, case.model)
    return trace(model, change(plan_for(model)), case.make(), case.options)


def cases(family):
    """Cases whose model has tokens to share."""
    loaded = families.load(family)
    plans = {name: plan_for(model_of(family, name)) for name in loaded.MODELS}
    of_forwards = [name for name, plan in plans.items() if {*map(method_of, plan.modules)} == {"forward"}]
    return [case for case in loaded.CASES if plans[case.model].shares_sequence and case.model in of_forwards]


torch.set_num_threads(1)
with torch.inference_mode():
    if sys.argv[1:] == ["mistakes"]:
        found = {
            what: traced(family, next(c for c in families.load(family).CASES if c.name == name), change)
            for what, (family, name, change) in MISTAKES.items()
        }
    else:
        found = {f"{family}/{case.name}": traced(family, case) for family in sys.argv[1:] for case in cases(family)}
sys.stdout.write(f"\n{json.dumps(found)}\n")
