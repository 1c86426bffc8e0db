"""Every form of weight patch gives what ComfyUI's own ModelPatcher gives: also by leaving out what that does.

By turns in two of four placements, and in the soak in all.
"""

import json

import pytest
from support.faults import SOAK
from support.ranks import COMFY, run_ranks

EVERY = (
    "none", "diff", "set", "lora", "weights outside of .weight and .bias", "biases", "dora", "loha", "lokr", "glora", "oft", "boft",
    "a wider input, padded", "a wider input by LoRA", "of the first rows", "with a function", "with a function of a pack",
    "with a function in functions", "with a class method", "an adapter of a pack", "a class of a function",
    "merge", "difference", "merge of LoRAs", "LoRA on a merge of merges",
)  # fmt: skip
SOME = ("none", "lora", "LoRA on a merge of merges")
QUANTISED = ("none", "set", "lora", "LoRA on a merge of merges")
MODELS = [
    ("wan_t2v", "wan_t2v_low", EVERY),
    ("flux", "flux_fp8_plain", EVERY if SOAK else SOME),
    ("flux_fp8_scaled", "flux", QUANTISED),
]
BOUND = 1e-5  # standard deviations: docs/numerics.md
NOTHING = {"flux": ("weights outside of .weight and .bias",), "wan_t2v": ("weights outside of .weight and .bias",)}
"""What ComfyUI leaves as it is."""


REFUSED = (
    "a_pack.<lambda> is not to be found under its name",
    "an object of the class _thread.lock",
    "with_class.<locals>.Local is a class that the workers would make otherwise",
    "with_argument.<locals>.Local is a class that the workers cannot make",
    "an object() that code compares by identity",
    "a tensor that torch has quantised",
)


@pytest.fixture(scope="module")
def reports(checkpoints_dir):
    folder = str(checkpoints_dir / "diffusion_models")
    found = run_ranks("weights/patched_ranks.py", 2, folder, json.dumps(MODELS), preload=COMFY)
    return {(report["model"], report["form"]): report for report in found}


@pytest.mark.parametrize(("model", "form"), [(model, form) for model, _, forms in MODELS for form in forms])
def test_patched_weights_are_stock(model, form, reports):
    report = reports[model, form]
    assert report["std"] > 1e-2
    assert all(off <= BOUND for off in report["off"].values()), report
    if form != "none":
        assert (report["matters"] > 1e-2) == (form not in NOTHING.get(model, ())), report


def test_patches_that_cannot_be_sent_are_refused_by_name(reports):
    said = reports["", "refused"]["said"]
    assert [words for words, text in zip(REFUSED, said, strict=True) if words not in text] == []
    assert all("the weight patch of a.weight cannot be sent to the workers: " in text for text in said)
