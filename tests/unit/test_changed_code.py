"""What node packs do to ComfyUI's classes and modules is seen; what ComfyUI itself does is not taken for it."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def found():
    return run_steps(Path(__file__).with_name("changed_code_ranks.py"), 1, by="name", preload=COMFY)


def test_stock_code_is_as_in_its_files(found):
    """tests/ranks/families has this for all classes."""
    assert found["stock"] == {"changes": [], "again": True}


def test_what_ranks_would_not_do_otherwise_is_no_change(found):
    assert found["harmless"]["changes"] == []
    assert found["compiled"]["changes"] == []


def test_packages_may_be_anywhere(found):
    """One H100's had a folder of their own: every prompt was refused there."""
    assert found["packages elsewhere"] == {"changes": [], "libraries": [True, True, False, False]}


def test_vaes(found):
    assert found["a VAE"]["clean"] == []
    assert [what for what, _ in found["a VAE"]["changes"]] == ["comfy.ldm.wan.vae.WanVAE.decode"]


CHANGES = {
    "a method": "comfy.ldm.wan.model.WanModel.forward_orig",
    "a method, wrapped": "comfy.ldm.wan.model.WanModel.forward_orig",
    "a method, partial": "comfy.ldm.wan.model.WanModel.unpatchify",
    "a method, another one of ComfyUI's": "comfy.ldm.wan.model.WanModel.forward_orig",
    "code inside a method": "comfy.ldm.wan.model.WanModel.unpatchify",
    "a method, compiled": "comfy.ldm.wan.model.WanModel.forward_orig",
    "a method of an older file": "comfy.ldm.wan.model.WanModel.forward_orig",
    "a block's method": "comfy.ldm.wan.model.WanAttentionBlock.forward",
    "a base class's method": "comfy.ldm.wan.model.WanSelfAttention.forward",
    "a method of an operation": "comfy.ops.disable_weight_init.Linear.forward_comfy_cast_weights",
    "a method that hides a base's": "comfy.ops.manual_cast.Linear.forward",
    "a method of torch's": "torch.nn.modules.linear.Linear.forward",
    "attention, by name": "comfy.ldm.wan.model.optimized_attention",
    "attention, of ComfyUI's, by name": "comfy.ldm.wan.model.optimized_attention",
    "rotations, by name": "comfy.ldm.wan.model.apply_rope1",
    "rotations, where they stand": "comfy.ldm.flux.math.apply_rope1",
    "a function of a function": "comfy.ldm.flux.math._apply_rope1",
    "a function of torch's": "torch.addcmul",
    "a function of torch's, by a library": "torch.addcmul",
    "a class": "comfy.ldm.wan.model.EmbedND",
    "a flag of a class": "comfy.ops.manual_cast.Linear.comfy_cast_weights",
    "a constant": "comfy.ops.NVIDIA_MEMORY_CONV_BUG_WORKAROUND",
    "a constant that is computed": "comfy.ldm.modules.attention.FORCE_UPCAST_ATTENTION_DTYPE",
    "a lambda": "comfy.ldm.wan.model.repeat_e",
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_seen_by_name_and_file(case, found):
    report = found[case]
    changes = dict(report["changes"])
    assert CHANGES[case] in changes, report
    assert report["foreign"] in (None, changes[CHANGES[case]])
    assert report["quick"]
    if case == "a method of an older file":
        assert changes[CHANGES[case]].endswith("comfy/ldm/wan/model.py")
    assert report["after"] == []
