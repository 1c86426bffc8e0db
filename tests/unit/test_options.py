"""Which entries of transformer_options ranks get."""

import torch

from cp_runtime.comfy.ui.options import plain_options


def test_what_a_message_carries_is_sent_and_a_set_as_a_tuple():
    sigmas = torch.ones(1)
    options = {"sigmas": sigmas, "run_ax": False, "stg_self_attn_blocks": frozenset({29, 3}), "names": {"b", "a"}}
    others = {"wrappers": {}, "cache": object(), "objects": {object()}, "patch": print}
    assert plain_options({**options, **others}) == {**options, "stg_self_attn_blocks": (29, 3), "names": ("a", "b")}
