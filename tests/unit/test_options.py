"""Which entries of transformer_options ranks get, and what stands for the others."""

from collections import OrderedDict
from types import MappingProxyType

import numpy
import pytest
import torch

from cp_runtime.comfy.ui.options import plain_options
from cp_runtime.errors import UnsentError
from cp_runtime.pool.protocol import flatten, unflatten


def test_what_a_message_carries_is_sent_and_a_set_as_a_tuple():
    sigmas = torch.ones(1)
    options = {"sigmas": sigmas, "run_ax": False, "stg_self_attn_blocks": frozenset({29, 3}), "names": {"b", "a"}}
    assert plain_options({**options, "wrappers": {}}) == {**options, "stg_self_attn_blocks": (29, 3), "names": ("a", "b")}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (MappingProxyType({"scale_x": 2.0}), {"scale_x": 2.0}),
        (OrderedDict(a={"b": 1}), {"a": {"b": 1}}),
        ([numpy.int64(3), numpy.float32(0.5)], [3, 0.5]),
        ((numpy.bool_(True),), (True,)),
    ],
)
def test_forwards_read_these_alike(given, sent):
    assert plain_options({"own": given}) == {"own": sent}
    assert flatten(plain_options({"own": given}), None) == flatten({"own": sent}, None)


UNSENT = {
    "object": object(),
    "function": print,
    "bytes": b"1",
    "key": {object(): 1},
    "set": {object()},
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(1, device="meta"),
    "array": numpy.ones(2),
}


@pytest.mark.parametrize("kind", UNSENT)
@pytest.mark.parametrize("around", [lambda value: value, lambda value: {"in": [1, value]}], ids=["alone", "inside"])
def test_what_no_message_carries(kind, around):
    options = plain_options({"own": around(UNSENT[kind]), "sigma": 2.0})
    there = unflatten(flatten(options, lambda tensor, path: None), None)
    assert there["sigma"] == 2.0
    found = there["own"]["in"][1] if isinstance(there["own"], dict) else there["own"]
    found = found[0] if isinstance(found, tuple) else found  # of a set
    assert found is not None
    assert {found: 1}[found] == 1  # as a key
    for use in (len, bool, list, lambda it: it.name, lambda it: it(), lambda it: it * 2, lambda it: 2 + it, lambda it: it == 1):
        with pytest.raises(UnsentError, match=r"transformer_options\['own'\].*, which cannot be sent"):
            use(found)
