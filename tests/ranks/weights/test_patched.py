"""Every form of weight patch in every placement gives what ComfyUI's own ModelPatcher gives: also by leaving out what that does."""

import json

import pytest
from support.ranks import COMFY, run_ranks

MODELS = {"flux": "flux_fp8_plain", "wan_t2v": "wan_t2v_low", "flux_fp8_scaled": "flux"}
FORMS = ("diff", "set", "lora")
PLAIN = (
    *FORMS, "weights outside of .weight and .bias", "biases", "dora", "loha", "lokr", "glora", "oft", "boft",
    "a wider input, padded", "a wider input by LoRA", "of the first rows", "with a function",
)  # fmt: skip
MERGES = ("merge", "difference", "merge of LoRAs", "LoRA on a merge of merges")
BOUND = 2e-5  # standard deviations: docs/numerics.md
NOTHING = {"flux": ("weights outside of .weight and .bias",), "wan_t2v": ("weights outside of .weight and .bias",)}
"""What ComfyUI leaves as it is."""


@pytest.fixture(scope="module")
def reports(checkpoints_dir):
    folder, models = str(checkpoints_dir / "diffusion_models"), json.dumps(list(MODELS.items()))
    found = run_ranks("weights/patched_ranks.py", 2, folder, models, preload=COMFY)
    return {(report["model"], report["form"]): report for report in found}


@pytest.mark.parametrize(
    ("model", "form"),
    [(model, form) for model in MODELS for form in ("none", *(FORMS if "fp8" in model else PLAIN), *MERGES)],
)
def test_patched_weights_are_stock(model, form, reports):
    report = reports[model, form]
    assert report["std"] > 1e-2
    assert all(off <= BOUND for off in report["off"].values()), report
    if form != "none":
        assert (report["matters"] > 1e-2) == (form not in NOTHING.get(model, ())), report


def test_patches_that_cannot_be_sent_are_refused_by_name(reports):
    adapter, weight, function = reports["", "refused"]["said"]
    assert "the patch of a.weight is a OfAPack of another node pack" in adapter
    assert "the other model of a merge has a.weight as a Stored of another node pack" in weight
    assert "the patch of a.weight transforms the weight with" in function
