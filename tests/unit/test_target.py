from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cp_runtime.comfy.shared.files import ModelFiles
from cp_runtime.comfy.shared.recipe import Factory, Recipe
from cp_runtime.comfy.shared.weights import sample_weights, weight_patches_digest
from cp_runtime.comfy.ui.notes import ON_RANKS
from cp_runtime.comfy.ui.target import Target
from cp_runtime.errors import MirrorError
from cp_runtime.pool.messages import Load, Loaded

REQUEST = Load(key="k", recipe={}, patches=[], patches_uuid="u1")
SAME = SimpleNamespace(compare=lambda *_: None)
"""A fingerprint that the ranks have, too: tests/ranks compares real ones."""
PAYLOAD = torch.empty(0, dtype=torch.uint8)


def target(seed=0, patches_in=None, backup=()):
    """A model in the UI process. Weight patches are in it where `patches_in` is an id; `backup`: weights in an altered state."""
    model = SimpleNamespace(
        get_dtype=lambda: torch.bfloat16,
        manual_cast_dtype=None,
        current_weight_patches_uuid=patches_in,
        diffusion_model=transformer(seed),
    )
    patcher = SimpleNamespace(model=model, patches={}, patches_uuid="u1", backup=dict.fromkeys(backup), hook_backup={})
    recipe = Recipe("load_diffusion_model", "/models/flux.safetensors")
    return Target(patcher, recipe, "flux.safetensors", ModelFiles([]), 0.0, list, SAME)


def transformer(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))


def replies(**second):
    good = Loaded(
        digest=weight_patches_digest(REQUEST, PAYLOAD), patches_uuid="u1", dtype="torch.bfloat16", cast_dtype="None",
        formats=("fp8",), samples=sample_weights(transformer(0)), code="c", state="s", contents="n", bytes=1, seconds=1.0,
    )  # fmt: skip
    return [good, replace(good, **second)]


OTHER_WEIGHTS = {"samples": sample_weights(transformer(1))}
# The model in the UI process, what rank 1 has other than rank 0, and what is said about it.
CASES = {
    "equal mirrors": ({}, {}, None),
    "digest": ({}, {"digest": "e"}, r"rank 1 \(pid 11\) has digest e for flux.safetensors"),
    "patches": ({}, {"patches_uuid": "u0"}, r"rank 1 \(pid 11\) has patches_uuid u0 for flux.safetensors"),
    "dtype": ({}, {"dtype": "torch.float16"}, r"rank 1 \(pid 11\) has dtype torch.float16 for flux.safetensors"),
    "cast dtype": ({}, {"cast_dtype": "torch.float32"}, r"rank 1 \(pid 11\) has cast_dtype torch.float32 for flux.safetensors"),
    # One would compute its tokens in fp8, the other in half precision.
    "devices": ({}, {"formats": ()}, r"flux.safetensors .* rank 0 in fp8; rank 1 in none\..*devices of CP Config"),
    "other weights": ({}, OTHER_WEIGHTS, r"rank 1 \(pid 11\) read another weight 0.weight from flux.safetensors"),
    # Weights that are not as they were loaded are not compared.
    "patched": ({"seed": 1, "patches_in": "u0"}, {}, None),
    "on the ranks": ({"seed": 1, "patches_in": ON_RANKS}, {}, r"rank 0 \(pid 10\) read another weight 0.weight from"),
    "backed up": ({"seed": 1, "backup": ["diffusion_model.0.weight", "diffusion_model.0.bias"]}, {}, None),
    # Nor are those that a rank's device holds in another format. That all compute in the same dtype is checked beside it.
    "another format": ({}, {"samples": sample_weights(transformer(1).to(torch.bfloat16))}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_differs_is_named(case):
    ours, second, words = CASES[case]
    with pytest.raises(MirrorError, match=words) if words else nullcontext():
        target(**ours).verify(REQUEST, PAYLOAD, replies(**second), [10, 11], lambda request: [])


@pytest.mark.parametrize(("travelled", "seen"), [(True, True), (False, False)])
def test_all_bytes_of_patches_are_compared_where_they_cross_a_network(travelled, seen):
    """A number between the samples is another one."""
    block, request = torch.arange(1 << 16).view(torch.uint8), replace(REQUEST, travelled=travelled)
    other = block.clone()
    other[100] += 1
    digests = [weight_patches_digest(request, each) for each in (block, other, block[: 1 << 16])]
    assert (digests[0] != digests[1]) is seen
    assert digests[2] not in digests[:2]


def test_the_key_depends_on_everything_that_changes_the_weights():
    recipes = [
        Recipe("load_diffusion_model", "/a"),
        Recipe("load_checkpoint_guess_config", "/a"),
        Recipe("load_diffusion_model", "/b"),
        Recipe("load_diffusion_model", "/a", {"dtype": "float8_e4m3fn"}),
        Recipe("load_diffusion_model", "/a", {}, (1, 2)),
        Recipe("factory", "/a", factory=Factory("/", "/p.py", "load", [], None, (("/p.py", (1,)),), ())),
        Recipe("factory", "/a", factory=Factory("/", "/p.py", "load", [], None, (("/p.py", (2,)),), ())),
    ]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
