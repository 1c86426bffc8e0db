from types import SimpleNamespace

import pytest
import torch

from cp_runtime.comfy.ui.target import Target, verify
from cp_runtime.comfy.wire.recipe import Recipe
from cp_runtime.errors import MirrorError


def target():
    model = SimpleNamespace(get_dtype=lambda: torch.bfloat16, manual_cast_dtype=None)
    patcher = SimpleNamespace(model=model, patches={}, patches_uuid="u1")
    return Target.of(patcher, Recipe("load_diffusion_model", "/models/flux.safetensors"))


def replies(**second):
    good = {"digest": "d", "patches_uuid": "u1", "dtype": "torch.bfloat16", "cast_dtype": "None"}
    return [good, {**good, **second}]


def test_equal_mirrors_pass():
    verify(target(), "d", replies(), [10, 11])


@pytest.mark.parametrize(
    ("field", "value"),
    [("digest", "e"), ("patches_uuid", "u0"), ("dtype", "torch.float16"), ("cast_dtype", "torch.float32")],
)
def test_a_rank_that_differs_is_named(field, value):
    with pytest.raises(MirrorError, match=rf"rank 1 \(pid 11\) has {field} {value} for flux.safetensors"):
        verify(target(), "d", replies(**{field: value}), [10, 11])


def test_the_key_depends_on_everything_that_changes_the_weights():
    recipes = [
        Recipe("load_diffusion_model", "/a"),
        Recipe("load_checkpoint_guess_config", "/a"),
        Recipe("load_diffusion_model", "/b"),
        Recipe("load_diffusion_model", "/a", {"dtype": "float8_e4m3fn"}),
        Recipe("load_diffusion_model", "/a", {}, (1, 2)),
    ]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
