"""Every table against the stock forward, one rank of two without the other; and tables with a mistake, which must be found."""

import json
import os
from pathlib import Path

import pytest
from support import families, preloaded
from support.package import load_package

load_package()
from cp_runtime.engine.plan import method_of  # noqa: E402
from cp_runtime.families import PLANS  # noqa: E402

SCRIPT = Path(__file__).with_name("trace_check.py")
CASES = [
    (family, case.name)
    for family in families.NAMES
    for case in families.load(family).CASES
    if (plan := PLANS[families.load(family).MODELS[case.model].cls]).shares_sequence
    and {*map(method_of, plan.modules)} == {"forward"}  # that is what the tracer records
]
# What is wrong -> what the tracer says.
MISTAKES = {
    "positions are not split": "blocks.*(freq_cis_img) (36, 48): dimension 0 is as long as img, and is not split",
    "positions are split along another dimension": "(pe) (1, 1, 43, 32, 2, 2): dimension 2 is as long as txt + img",
    "number of dimensions": "blocks.0(freq_cis_img): expected 3 dimensions, got 2",
    "streams stand for each other": "double_blocks.0: what this rank has, (1, 2, 21, 64), is not its part",
    "joint order": "double_stream_blocks.0.block.attn1: what this rank has",
    "attention_names is missing": "comfy.ldm.hydit.attn_layers.optimized_attention is called without transformer_options",
    "local is missing": "blocks.0.attn2: rank 1 has 17 keys in attention; its layout says 18",
    "attention is not shared": "head: what this rank has, (1, 30, 64), is not its part",
    "residuals are not split": "control has residuals of kind 'output'; the table does not say to which tokens they are added",
    "tokens are gathered too early": "blocks.*(skip) (1, 36, 96): dimension 1 is as long as img, and is not split",
    "a mask is not split": "(encoder_hidden_states_mask) (1, 9): dimension 1 is as long as txt, and is not split",
    "an index of tokens is not planned": "(timestep_zero_index) is 30: if that counts tokens, the table must say so",
}


def traced(*arguments):
    env = {**os.environ, "PYTHONPATH": os.environ["COMFYUI_PATH"]}
    done = preloaded.run([str(SCRIPT), *arguments], env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def findings(request):
    """Findings in the cases of all families that were selected."""
    wanted = {item.callspec.params["family"] for item in request.session.items if "findings" in getattr(item, "fixturenames", ())}
    return traced(*sorted(wanted))


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: value)
def test_a_rank_computes_what_the_stock_forward_computes(family, case, findings):
    assert findings[f"{family}/{case}"] == []


@pytest.fixture(scope="module")
def mistakes():
    return traced("mistakes")


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found(what, mistakes):
    assert MISTAKES[what] in "\n".join(mistakes[what])
