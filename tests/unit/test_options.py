"""Which entries of transformer_options ranks get."""

from types import MappingProxyType

import torch

from cp_runtime.comfy.ui.options import plain_options


def test_what_a_message_carries_is_sent_and_a_set_as_a_tuple():
    sigmas = torch.ones(1)
    options = {"sigmas": sigmas, "run_ax": False, "stg_self_attn_blocks": frozenset({29, 3}), "names": {"b", "a"}}
    others = {"wrappers": {}, "cache": object(), "objects": {object()}, "patch": print}
    assert plain_options({**options, **others}) == {**options, "stg_self_attn_blocks": (29, 3), "names": ("a", "b")}


def test_a_mapping_of_another_type_is_a_dict():
    """A forward reads it like one."""
    assert plain_options({"rope_options": MappingProxyType({"scale_x": 2.0})}) == {"rope_options": {"scale_x": 2.0}}
