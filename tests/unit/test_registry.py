"""Every plan fits ComfyUI's class, every plan is tested, and docs/generated/families.md says so."""

from pathlib import Path

import pytest
from support import families, preloaded
from support.package import ROOT
from support.ranks import COMFY, run_ranks

from cp_runtime.families import PLANS

SCRIPT = Path(__file__).with_name("plan_ranks.py")


@pytest.fixture(scope="module")
def checked():
    """Errors of every plan against a tiny model of its class, by family module and model."""
    (found,) = run_ranks(SCRIPT, 1, preload=COMFY)
    return found


MODELS = [(family, model) for family in families.NAMES for model in families.load(family).MODELS]


@pytest.mark.parametrize(("family", "model"), MODELS)
def test_modules_and_arguments_of_the_plan_exist(family, model, checked):
    error = checked[f"{family}/{model}"]
    assert error is None, f"{error}\nComfyUI changed: update the table in cp_runtime/families, then run its cases in tests/ranks."


def test_a_prefix_is_prepared_with_weights_in_this_process(checked):
    assert checked["prepared before sampling"] == ["preprocess_prefix"]


def test_every_plan_has_cases():
    loaded = [families.load(name, None) for name in families.NAMES]
    tested = {family.MODELS[case.model].cls for family in loaded for case in family.CASES}
    assert sorted(PLANS.keys() - tested) == []


def test_the_document_is_current():
    done = preloaded.run([str(ROOT / ".ci" / "registry.py"), "--check"])
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_guide_is_the_real_file():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    example = guide.partition("```python\n")[2].partition("```")[0]
    assert example == (ROOT / "cp_runtime" / "families" / "hydit.py").read_text()
