from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cp_runtime.comfy.model.ui_target import Target
from cp_runtime.comfy.model.wire_modules import layers_of
from cp_runtime.comfy.model.wire_recipe import Factory, Recipe
from cp_runtime.comfy.model.wire_samples import sample_weights, weight_patches_digest
from cp_runtime.errors import MirrorError
from cp_runtime.pool.messages import Load, Loaded

REQUEST = Load(key="k", recipe={}, patches=[], patches_uuid="u1")
PAYLOAD = torch.empty(0, dtype=torch.uint8)


def target(seed=0, patches_in=None, backup=(), factory=None):
    """A model in the UI process. Weight patches are in it where `patches_in` is an id; `backup`: weights in an altered state."""
    model = SimpleNamespace(
        get_dtype=lambda: torch.bfloat16,
        manual_cast_dtype=None,
        current_weight_patches_uuid=patches_in,
        diffusion_model=transformer(seed),
    )
    patcher = SimpleNamespace(model=model, patches={}, patches_uuid="u1", backup=dict.fromkeys(backup), hook_backup={})
    return Target(patcher, Recipe("load_diffusion_model", "/models/flux.safetensors", factory=factory), 0.0, list)


def transformer(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))


def replies(**second):
    good = Loaded(
        digest=weight_patches_digest([], PAYLOAD), patches_uuid="u1", dtype="torch.bfloat16", cast_dtype="None", formats=("fp8",),
        samples=sample_weights(transformer(0)), layers=layers_of(transformer(0)), bytes=1, seconds=1.0,
    )  # fmt: skip
    return [good, replace(good, **second)]


def verify(target, replies):
    target.verify(REQUEST, PAYLOAD, replies, [10, 11])


def test_equal_mirrors_pass():
    verify(target(), replies())


@pytest.mark.parametrize(
    ("field", "value"), [("digest", "e"), ("patches_uuid", "u0"), ("dtype", "torch.float16"), ("cast_dtype", "torch.float32")]
)
def test_a_rank_that_differs_is_named(field, value):
    with pytest.raises(MirrorError, match=rf"rank 1 \(pid 11\) has {field} {value} for flux.safetensors"):
        verify(target(), replies(**{field: value}))


def test_devices_of_different_ability_are_named():
    """One would compute its tokens in fp8, the other in half precision."""
    with pytest.raises(MirrorError, match=r"flux.safetensors .* rank 0 in fp8; rank 1 in none\..*devices of CP Config"):
        verify(target(), replies(formats=()))


def test_a_rank_with_other_weights_is_named():
    with pytest.raises(MirrorError, match=r"rank 1 \(pid 11\) read another weight 0.weight from flux.safetensors"):
        verify(target(), replies(samples=sample_weights(transformer(1))))


def test_a_loader_of_a_node_pack_must_make_the_same_layers():
    """It may follow a setting of ComfyUI's process. ComfyUI's own loaders may take other layers for another device."""
    others = replies(layers="others")
    loader = Factory("/packs/p/loaders.py", "load_it", [], None, (), ())
    verify(target(factory=loader), replies())
    verify(target(), others)
    with pytest.raises(MirrorError, match=r"load_it made other layers of flux.safetensors on rank 1 \(pid 11\)"):
        verify(target(factory=loader), others)


@pytest.mark.parametrize(
    "state",
    [{"patches_in": "u0"}, {"backup": ["diffusion_model.0.weight", "diffusion_model.0.bias"]}],
    ids=["patched", "backed up"],
)
def test_weights_that_are_not_as_loaded_are_not_compared(state):
    verify(target(seed=1, **state), replies())


def test_weights_in_another_format_are_not_compared():
    """A rank's device may hold them otherwise. That all compute in the same dtype is checked beside it."""
    verify(target(), replies(samples=sample_weights(transformer(1).to(torch.bfloat16))))


def test_the_key_depends_on_everything_that_changes_the_weights():
    recipes = [
        Recipe("load_diffusion_model", "/a"),
        Recipe("load_checkpoint_guess_config", "/a"),
        Recipe("load_diffusion_model", "/b"),
        Recipe("load_diffusion_model", "/a", {"dtype": "float8_e4m3fn"}),
        Recipe("load_diffusion_model", "/a", {}, (1, 2)),
        Recipe("factory", "/a", factory=Factory("/p.py", "load", [], None, (("/p.py", "1"),), ())),
        Recipe("factory", "/a", factory=Factory("/p.py", "load", [], None, (("/p.py", "2"),), ())),
    ]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
